"""Results of the engine's queries, as frozen dataclasses."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

Ids = Sequence[int]
Cnf = Sequence[Sequence[Ids]]  # all of: any of: consecutive tokens


@dataclass(frozen=True, slots=True)
class Found:
    """Occurrences of a sequence: a range [start, end) of ranks in each shard's suffix array."""

    count: int
    segment_by_shard: list[tuple[int, int]]

    def places(self, first: int, most: int) -> list[tuple[int, int]]:
        """At most `most` occurrences from number `first` on, as (shard, rank)."""
        found: list[tuple[int, int]] = []
        for shard, (start, end) in enumerate(self.segment_by_shard):
            begin = min(start + first, end)
            first -= begin - start
            last = min(begin + most - len(found), end)
            found += [(shard, rank) for rank in range(begin, last)]
        return found


@dataclass(frozen=True, slots=True)
class FoundCnf:
    """Pointers (byte offsets into a shard's tokens) of places that satisfy all clauses.

    `approx`: there were too many to look at, and `count` is an estimate. If no place is found, the engine
    may leave out the shards, too.
    """

    count: int
    approx: bool
    ptrs_by_shard: list[list[int]]


@dataclass(frozen=True, slots=True)
class Count:
    count: int
    approx: bool


@dataclass(frozen=True, slots=True)
class Prob:
    """Counts and probability; `prob` is -1 if the prompt does not occur."""

    prompt_count: int
    continuation_count: int
    prob: float


@dataclass(frozen=True, slots=True)
class InfgramProb(Prob):
    """Relative to the longest suffix of the prompt that occurs, `suffix_length` tokens long."""

    suffix_length: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """Next tokens after the prompt: each token's count and probability."""

    prompt_count: int
    by_token: dict[int, tuple[int, float]]
    approx: bool

    @classmethod
    def of(cls, count: int, by_token: Mapping[int, int], unit: int) -> "Distribution":
        """Counts in a sample of one of `unit` places, with their shares of all places."""
        shares = {one: (by_token[one], by_token[one] / count) for one in sorted(by_token)}
        return cls(count, shares, unit > 1)


@dataclass(frozen=True, slots=True)
class InfgramDistribution(Distribution):
    """Relative to the longest suffix of the prompt that occurs, `suffix_length` tokens long."""

    suffix_length: int


@dataclass(frozen=True, slots=True)
class Document:
    """A part of a document: `display_length` tokens of its `length`.

    The needle begins at token `needle_offset` of the part. `metadata` has the corpus's other members, in
    `metadata`, and the text's origin: `path` and `linenum`. A `blocked` document was removed, and has
    neither tokens nor metadata.
    """

    index: int
    length: int
    display_length: int
    needle_offset: int
    metadata: dict[str, Any]
    token_ids: list[int]
    blocked: bool = False

    @classmethod
    def of(cls, answer: Any) -> "Document":
        """Convert the package's own object."""
        metadata: Any = {}
        with suppress(orjson.JSONDecodeError):  # indexes of other indexers may have none
            metadata = orjson.loads(answer.metadata)
        return cls(
            index=answer.doc_ix,
            length=answer.doc_len,
            display_length=answer.disp_len,
            needle_offset=answer.needle_offset,
            metadata=metadata if isinstance(metadata, dict) else {"metadata": metadata},
            token_ids=answer.token_ids,
            blocked=answer.blocked,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [left, right) of a text that occur `count` times."""

    left: int
    right: int
    length: int
    count: int
    unigram_logprob_sum: float
    _pointers: Callable[[], list[tuple[int, int]]]

    @property
    def pointers(self) -> list[tuple[int, int]]:
        """Its occurrences: (shard, pointer). Computed on demand: there may be millions."""
        return self._pointers()
