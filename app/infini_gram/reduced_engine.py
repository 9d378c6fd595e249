"""An index without its removed documents: every result is that of an index built without them.

The counts of an index of the removed documents are subtracted, and their places left out. The package's
`InfiniGramEngineDiff` subtracts in the search for an attribution's spans alone, and starts a thread for each
removed place.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice

from app.core.errors import EngineInputError
from app.infini_gram.declarations import Declaration
from app.infini_gram.distribution import sampling_unit
from app.infini_gram.engine import Engine, bounded
from app.infini_gram.engine_types import (
    Cnf,
    Count,
    Distribution,
    Document,
    Found,
    FoundCnf,
    Ids,
    InfgramProb,
    Prob,
    Span,
)
from app.infini_gram.manifest import version_of
from app.infini_gram.removed_documents import RemovedDocuments
from app.infini_gram.spans import longest_spans
from app.infini_gram.thread_budget import ThreadBudget

# Occurrences of a text that are read for a page of its documents, at most: about half a second.
MAX_READ_PLACES = 1_000_000
_READ_TOGETHER = 4096
_UNSEEN_LOGPROB = -10_000.0  # the package's


def open_engine(declaration: Declaration, threads: ThreadBudget | None = None) -> Engine:
    """Open an index, without the documents that it declares as removed. Raises as `Engine` does."""
    return (ReducedEngine if declaration.removed_paths else Engine)(declaration, threads)


class ReducedEngine(Engine):
    def __init__(self, declaration: Declaration, threads: ThreadBudget | None = None) -> None:
        super().__init__(declaration, threads)
        first, *others = declaration.removed_paths
        removed = replace(declaration, path=first, more_paths=tuple(others), removed_paths=())
        self._gone = Engine(removed, self._threads)
        self.removed = RemovedDocuments(self, self._copies, self._gone)
        self.total_tokens -= self._gone.total_tokens
        self.total_documents -= self._gone.total_documents

    @property
    def version(self) -> int:
        return version_of([*self.manifests, *self._gone.manifests])

    # --- Counting ---------------------------------------------------------------------------------

    def find(self, ids: Ids) -> Found:
        """Ranges of ranks include those in removed documents, except if there are no others."""
        found = super().find(ids)
        if count := found.count - self._gone.count(ids).count:
            return Found(count, found.segment_by_shard)
        return Found(0, [(start, start) for start, _ in found.segment_by_shard])

    def places(self, found: Found, first: int, most: int) -> list[tuple[int, int]]:
        if found.count == sum(end - start for start, end in found.segment_by_shard):
            return found.places(first, most)
        if first >= found.count:
            return []
        places = ((shard, rank) for shard, rank, _ in self._remaining(found, MAX_READ_PLACES))
        return list(islice(places, first, first + most))

    def _remaining(self, found: Found, limit: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Occurrences in remaining documents: shard, rank and pointer. `limit` bounds those that are read."""
        read = 0
        for shard, (start, end) in enumerate(found.segment_by_shard):
            for begin in range(start, end, _READ_TOGETHER):
                if limit is not None and read >= limit:
                    raise EngineInputError(
                        f"The page is too far back: this text occurs in removed documents, and {limit:,} "
                        "of its places are read at most."
                    )
                pointers = self.shards[shard].pointers(begin, min(begin + _READ_TOGETHER, end))
                read += len(pointers)
                for rank, pointer in enumerate(pointers, begin):
                    if not self.removed.has_pointer(shard, pointer):
                        yield shard, rank, pointer

    def find_cnf(self, cnf: Cnf, max_clause_freq: int, max_diff_tokens: int) -> FoundCnf:
        """Those places of all documents that are in remaining ones; an estimate is reduced by the others' share."""
        found = super().find_cnf(cnf, max_clause_freq, max_diff_tokens)
        pointers = [
            [one for one in of_shard if not self.removed.has_pointer(shard, one)]
            for shard, of_shard in enumerate(found.ptrs_by_shard)
        ]
        before, after = sum(map(len, found.ptrs_by_shard)), sum(map(len, pointers))
        count = found.count if before == after else found.count * after // before
        return FoundCnf(count, found.approx, pointers)

    def count(self, ids: Ids) -> Count:
        count = super().count(ids).count
        return Count(count - self._gone.count(ids).count if count else 0, approx=False)

    def count_cnf(self, cnf: Cnf, max_clause_freq: int, max_diff_tokens: int) -> Count:
        found = self.find_cnf(cnf, max_clause_freq, max_diff_tokens)
        return Count(found.count, found.approx)

    # --- Next tokens ------------------------------------------------------------------------------

    def prob(self, ids: Ids) -> Prob:
        found, gone = super().prob(ids), self._gone.prob(ids)
        prompt = found.prompt_count - gone.prompt_count
        continued = found.continuation_count - gone.continuation_count
        return Prob(prompt, continued, continued / prompt if prompt else -1.0)

    def ntd(self, ids: Ids, max_support: int) -> Distribution:
        """From a sample of all places; tokens that also follow in removed documents are counted exactly."""
        bound = bounded("max_support", max_support, 1)
        found, gone = super().find(ids), self._gone.find(ids)
        unit = sampling_unit(found.count, bound)
        counts = self.sample_next(found, len(ids), unit)
        if gone.count <= bound:
            removed = self._gone.sample_next(gone, len(ids), 1)
        else:
            removed = +Counter({one: self._gone.count_next(gone, len(ids), one) for one in counts})
        for token in removed.keys() & counts.keys():
            exact = counts[token] if unit == 1 else self.count_next(found, len(ids), token)
            counts[token] = exact - removed[token]
        return Distribution.of(found.count - gone.count, +counts, unit)

    def infgram_prob(self, ids: Ids) -> InfgramProb:
        longest = super().infgram_prob(ids).suffix_length
        prompt, last = ids[:-1], ids[-1]

        def is_absent(length: int) -> bool:
            return not self.count(prompt[len(prompt) - length :]).count

        length = bisect_left(range(1, longest + 1), True, key=is_absent)
        found = self.prob([*prompt[len(prompt) - length :], last])
        return InfgramProb(found.prompt_count, found.continuation_count, found.prob, length)

    # --- Documents --------------------------------------------------------------------------------

    def document_by_pointer(
        self, shard: int, pointer: int, needle_length: int, max_context: int
    ) -> Document:
        return self._blocked(
            super().document_by_pointer(shard, pointer, needle_length, max_context)
        )

    def document_by_index(self, index: int, max_context: int) -> Document:
        return self._blocked(super().document_by_index(index, max_context))

    def _blocked(self, document: Document) -> Document:
        if document.index not in self.removed.numbers:
            return document
        return Document(document.index, 0, 0, 0, {}, [], blocked=True)

    def _copies(self, content: bytes) -> list[tuple[int, int]]:
        """The documents with this content (a separator and tokens), as (shard, number in it)."""
        width = self._width
        ids = [
            int.from_bytes(content[n : n + width], "little") for n in range(0, len(content), width)
        ]
        with self._threads.take(self.shard_count):
            # A separator follows each document, except the last of a shard.
            segments = self._package.engine.find(input_ids=[*ids, ids[0]]).segment_by_shard
        found: list[tuple[int, int]] = []
        for number, (shard, segment) in enumerate(zip(self.shards, segments, strict=True)):
            found += [(number, shard.document_at(one)) for one in shard.pointers(*segment)]
            if shard.documents and shard.content(shard.documents - 1) == content:
                found.append((number, shard.documents - 1))
        return found

    # --- Attribution ------------------------------------------------------------------------------

    def attribute(
        self,
        ids: Ids,
        delimiter_ids: Ids,
        minimum_length: int,
        maximum_frequency: int,
        allow_partial_words: bool,
    ) -> list[Span]:
        checked = self._ids(ids)
        least = bounded("minimum_length", minimum_length, 0)
        most = bounded("maximum_frequency", maximum_frequency, 1)
        logprob = cache(self._logprob)
        spans: list[Span] = []
        end = 0
        for left, right in longest_spans(
            checked,
            lambda part: self.count(part).count > 0,
            frozenset(self._ids(delimiter_ids)),
            None if allow_partial_words else self.tokenizer.word_start_ids(),
        ):
            part = checked[left:right]
            if right <= end or len(part) < least:
                continue
            found = self.find(part)
            if found.count > most:
                continue
            end = right
            rarity = sum(map(logprob, part))
            places = partial(self._pointers, found)
            spans.append(Span(left, right, len(part), found.count, rarity, places))
        return spans

    def _pointers(self, found: Found) -> list[tuple[int, int]]:
        return [(shard, pointer) for shard, _, pointer in self._remaining(found)]

    def _logprob(self, token: int) -> float:
        count = self.count([token]).count
        return math.log(count) - math.log(self.total_tokens) if count else _UNSEEN_LOGPROB
