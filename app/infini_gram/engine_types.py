"""Results of the engine's queries, as frozen dataclasses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Ids = Sequence[int]
Cnf = Sequence[Sequence[Ids]]  # all of: any of: consecutive tokens


@dataclass(frozen=True, slots=True)
class Found:
    """Occurrences of a sequence: a range [start, end) of ranks in each shard's suffix array."""

    count: int
    segment_by_shard: list[tuple[int, int]]


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


@dataclass(frozen=True, slots=True)
class InfgramDistribution(Distribution):
    """Relative to the longest suffix of the prompt that occurs, `suffix_length` tokens long."""

    suffix_length: int


@dataclass(frozen=True, slots=True)
class Document:
    """A part of a document: `display_length` tokens of its `length`.

    The needle begins at token `needle_offset` of the part. `metadata` has the corpus's other members, in
    `metadata`, and the text's origin: `path` and `linenum`.
    """

    index: int
    length: int
    display_length: int
    needle_offset: int
    metadata: dict[str, Any]
    token_ids: list[int]
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [left, right) of a text that occur `count` times."""

    left: int
    right: int
    length: int
    count: int
    unigram_logprob_sum: float
    _found: Any  # the package's own object

    @property
    def pointers(self) -> list[tuple[int, int]]:
        """Its occurrences: (shard, pointer). Computed on demand: there may be millions."""
        return [(place.s, place.ptr) for place in self._found.docs]
