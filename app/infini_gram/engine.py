"""infini-gram's engine, typed and guarded: the only importer of the package `infini_gram`.

The package maps an index's files into memory and answers in C++ (https://infini-gram.io/pkg_doc).
Its Python part reports some bad input by a dictionary `{"error": ...}`; other bad input crashes the
process, or gives wrong results. Here every value is checked first.

Methods block, and release the interpreter's lock: call them through `Indexes.run`. Several threads
may call them at the same time.
"""

import os
import tempfile
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from app.core.errors import EngineError, EngineInputError
from app.infini_gram import manifest as manifests
from app.infini_gram.declarations import WIDTH, Declaration
from app.infini_gram.distribution import count_next_tokens, sampling_unit
from app.infini_gram.engine_types import (
    Cnf,
    Count,
    Distribution,
    Document,
    Found,
    FoundCnf,
    Ids,
    InfgramDistribution,
    InfgramProb,
    Prob,
    Span,
)
from app.infini_gram.manifest import Manifest
from app.infini_gram.shards import Shard, read_manifests
from app.infini_gram.thread_budget import ThreadBudget
from app.infini_gram.tokenizer import Tokenizer, open_tokenizer

# Bounds that keep the engine's 64-bit sums from overflowing, and a response in memory. A dialect
# has its own, far below.
MAX_TOKENS = 10_000_000
# Threads that one attribution starts in the engine at a time: for each token one, and one for each shard.
_ATTRIBUTION_THREADS = 128
_ANY_TOKEN = 0
_LAYOUT_VERSION = 4  # of the index's layout: suffix arrays over the tokens in reading order

MISSING_PACKAGE = (
    "the package infini-gram is not installed; it is supported on Linux on x86-64 alone"
)


class Engine:
    """One opened index. The caller verifies its files first, as `Indexes` does.

    Every method raises EngineInputError for values out of their range, and EngineError for errors that
    the engine reports. `vocab_size` bounds token ids; `shard_count` shards.
    """

    def __init__(self, declaration: Declaration, threads: ThreadBudget | None = None) -> None:
        """Open the index; `threads` is shared with others. Raises ManifestError, TokenizerError, EngineError."""
        self.declaration = declaration
        self._threads = threads or ThreadBudget()
        self.manifests: list[Manifest] = read_manifests(declaration)
        first = self.manifests[0]
        self.tokenizer: Tokenizer = open_tokenizer(declaration.tokenizer, first.end_id)
        self.token_dtype = first.token_dtype
        self.vocab_size = first.vocab_size
        self.end_id = first.end_id
        self.shard_count = sum(one.shards for one in self.manifests)
        self.total_tokens = sum(one.tokens for one in self.manifests)
        self.total_documents = sum(one.documents for one in self.manifests)
        self.numbered_documents = self.total_documents  # removed ones keep their numbers
        self._width = WIDTH[self.token_dtype]
        self._separator = b"\xff" * self._width
        self._directories: list[int] = []
        self.shards: list[Shard] = []
        for path, manifest in zip(declaration.paths, self.manifests, strict=True):
            manifests.check_declaration(declaration, path, manifest, self.tokenizer.sha256)
            manifests.check_sizes(path, manifest)
            self._open_directory(path, manifest)
        self._package = self._open()

    def _open_directory(self, path: Path, manifest: Manifest) -> None:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, directory)
        self._directories.append(directory)
        for number in manifest.shard_order:
            shard = Shard(manifest, number)
            for file in shard.open(directory):
                weakref.finalize(self, os.close, file)
            self.shards.append(shard)

    def _open(self) -> Any:
        try:
            from infini_gram.engine import InfiniGramEngine
        except ImportError as error:
            raise EngineError(f"{error}: {MISSING_PACKAGE}") from error
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as word_starts:
            ids = sorted(one for one in self.tokenizer.word_start_ids() if one < self.vocab_size)
            word_starts.write("".join(f"{one}\n" for one in ids))
            word_starts.flush()
            engine = InfiniGramEngine(
                # The engine takes a file for a suffix array if "table" is anywhere in its path, and so
                # on: this path has none of its words.
                index_dir=[f"/proc/self/fd/{one}" for one in self._directories],
                eos_token_id=self.end_id,
                vocab_size=self.vocab_size,
                version=_LAYOUT_VERSION,
                token_dtype=self.token_dtype,
                bow_ids_path=word_starts.name,
                attribution_block_size=max(1, _ATTRIBUTION_THREADS // (1 + self.shard_count)),
                precompute_unigram_logprobs=True,
                # As infini-gram API opens its indexes.
                ds_prefetch_depth=0,
                sa_prefetch_depth=0,
                od_prefetch_depth=0,
            )
        counted = (engine.engine.get_num_shards(), engine.get_total_doc_cnt())
        if counted != (self.shard_count, self.total_documents):
            raise EngineError(f"{self.declaration.path} opened with other shards or documents")
        return engine

    @property
    def version(self) -> int:
        """Distinguishes indexes that had the same name: 28 bits of a hash of the files' checksums."""
        return manifests.version_of(self.manifests)

    # --- Counting ---------------------------------------------------------------------------------

    def find(self, ids: Ids) -> Found:
        checked = self._ids(ids)
        with self._threads.take(self.shard_count):
            answer = _checked(self._package.find(checked))
        return Found(answer["cnt"], [tuple(one) for one in answer["segment_by_shard"]])

    def places(self, found: Found, first: int, most: int) -> list[tuple[int, int]]:
        """At most `most` occurrences from number `first` on, as (shard, rank)."""
        return found.places(first, most)

    def find_cnf(self, cnf: Cnf, max_clause_freq: int, max_diff_tokens: int) -> FoundCnf:
        """Places with one sequence of each clause, at most `max_diff_tokens` apart."""
        checked = self._cnf(cnf, max_clause_freq, max_diff_tokens)
        with self._threads.take(self._threads_of(cnf)):
            answer = _checked(self._package.find_cnf(**checked))
        return FoundCnf(answer["cnt"], answer["approx"], answer["ptrs_by_shard"])

    def count(self, ids: Ids) -> Count:
        checked = self._ids(ids)
        with self._threads.take(self.shard_count):
            answer = _checked(self._package.count(checked))
        return Count(answer["count"], answer["approx"])

    def count_cnf(self, cnf: Cnf, max_clause_freq: int, max_diff_tokens: int) -> Count:
        checked = self._cnf(cnf, max_clause_freq, max_diff_tokens)
        with self._threads.take(self._threads_of(cnf)):
            answer = _checked(self._package.count_cnf(**checked))
        return Count(answer["count"], answer["approx"])

    # --- Next tokens ------------------------------------------------------------------------------

    def prob(self, ids: Ids) -> Prob:
        """Probability of the last token after those before it."""
        checked = self._continued(ids)
        with self._threads.take(self.shard_count):
            answer = _checked(self._package.prob(*checked))
        return Prob(answer["prompt_cnt"], answer["cont_cnt"], answer["prob"])

    def ntd(self, ids: Ids, max_support: int) -> Distribution:
        """Next tokens, from a sample of about `max_support` places (`approx` if there are more)."""
        bound = bounded("max_support", max_support, 1)
        found = self.find(ids)
        unit = sampling_unit(found.count, bound)
        return Distribution.of(found.count, self.sample_next(found, len(ids), unit), unit)

    def sample_next(self, found: Found, length: int, unit: int) -> Counter[int]:
        """Next tokens of the places of `length` tokens: of one of `unit` places."""
        counts: Counter[int] = Counter()
        for shard, segment in zip(self.shards, found.segment_by_shard, strict=True):
            found_next = count_next_tokens(self._next_bytes(shard, length), *segment, unit)
            for token, places in found_next.items():
                # The end of the last document, which sorts first, and of any other, which sorts last.
                is_end = token in (b"", self._separator)
                counts[self.end_id if is_end else int.from_bytes(token, "little")] += places
        return counts

    def count_next(self, found: Found, length: int, token: int) -> int:
        """Places of `length` tokens that this one follows, or the end of a document."""
        keys = [token.to_bytes(self._width, "little")]
        if token == self.end_id:
            keys += [b"", self._separator]
        count = 0
        for shard, (start, end) in zip(self.shards, found.segment_by_shard, strict=True):
            ranks, next_bytes = range(start, end), self._next_bytes(shard, length)
            for key in keys:
                first = bisect_left(ranks, key, key=next_bytes)
                count += bisect_right(ranks, key, lo=first, key=next_bytes) - first
        return count

    def _next_bytes(self, shard: Shard, length: int) -> Callable[[int], bytes]:
        """The token after a place, by its rank: the ranks of one sequence are sorted by it."""
        return lambda rank: shard.token(shard.pointer(rank) + length * self._width)

    def infgram_prob(self, ids: Ids) -> InfgramProb:
        """Probability of the last token after the longest suffix of the others that occurs."""
        checked = self._continued(ids)
        with self._threads.take(self.shard_count):
            answer = _checked(self._package.infgram_prob(*checked))
        counts = (answer["prompt_cnt"], answer["cont_cnt"])
        return InfgramProb(*counts, answer["prob"], answer["suffix_len"])

    def infgram_ntd(self, ids: Ids, max_support: int) -> InfgramDistribution:
        """Next tokens after the longest suffix of the tokens that occurs."""
        bound = bounded("max_support", max_support, 1)
        suffix = self.infgram_prob([*ids, _ANY_TOKEN]).suffix_length
        found = self.ntd(ids[len(ids) - suffix :], bound)
        return InfgramDistribution(found.prompt_count, found.by_token, found.approx, suffix)

    # --- Documents --------------------------------------------------------------------------------

    def document_by_rank(
        self, shard: int, rank: int, needle_length: int, max_context: int
    ) -> Document:
        """The document around a rank that `find` returns: `max_context` tokens on each side."""
        bounded("shard", shard, 0, self.shard_count - 1)
        bounded("rank", rank, 0, self.shards[shard].tokens - 1)
        pointer = self.shards[shard].pointer(rank)
        return self.document_by_pointer(shard, pointer, needle_length, max_context)

    def document_by_pointer(
        self, shard: int, pointer: int, needle_length: int, max_context: int
    ) -> Document:
        bounded("shard", shard, 0, self.shard_count - 1)
        bounded("pointer", pointer, 0, self.shards[shard].size - 1)
        if pointer % self._width:
            raise EngineInputError(f"pointer must be a multiple of {self._width}.")
        if self.shards[shard].token(pointer) == self._separator:
            raise EngineInputError("A document begins there: the place has no token.")
        # Not the package's Python method: it refuses odd pointers even if a token is a byte.
        return Document.of(
            self._package.engine.get_doc_by_ptr_2(
                s=shard,
                ptr=pointer,
                needle_len=bounded("needle_length", needle_length, 0),
                max_ctx_len=bounded("max_context", max_context, 0),
            )
        )

    def document_by_index(self, index: int, max_context: int) -> Document:
        bounded("document_index", index, 0, self.numbered_documents - 1)
        bound = bounded("max_context", max_context, 0)
        return Document.of(self._package.engine.get_doc_by_ix_2(doc_ix=index, max_ctx_len=bound))

    # --- Attribution ------------------------------------------------------------------------------

    def attribute(
        self,
        ids: Ids,
        delimiter_ids: Ids,
        minimum_length: int,
        maximum_frequency: int,
        allow_partial_words: bool,
    ) -> list[Span]:
        # Not the package's Python method: it makes an object of each place of each span.
        answer = self._package.engine.attribute(
            input_ids=self._ids(ids),
            delim_ids=self._ids(delimiter_ids),
            min_len=bounded("minimum_length", minimum_length, 0),
            max_cnt=bounded("maximum_frequency", maximum_frequency, 1),
            enforce_bow=not allow_partial_words,
        )
        return [
            Span(
                one.l,
                one.r,
                one.length,
                one.count,
                one.unigram_logprob_sum,
                partial(_pointers, one),
            )
            for one in answer.spans
        ]

    # --- Checks -----------------------------------------------------------------------------------

    def _ids(self, ids: Ids) -> list[int]:
        if len(ids) > MAX_TOKENS:
            raise EngineInputError(f"A query has at most {MAX_TOKENS} tokens.")
        for one in ids:
            if type(one) is not int or not 0 <= one < self.vocab_size:
                raise EngineInputError(
                    f"{one!r} is not a token id of this index: they are 0 to {self.vocab_size - 1}."
                )
        return list(ids)

    def _continued(self, ids: Ids) -> tuple[list[int], int]:
        checked = self._ids(ids)
        if not checked:
            raise EngineInputError("A continuation is missing: the query has no tokens.")
        return checked[:-1], checked[-1]

    def _cnf(self, cnf: Cnf, max_clause_freq: int, max_diff_tokens: int) -> dict[str, Any]:
        clauses = [[self._ids(term) for term in clause] for clause in cnf]
        if not clauses or not all(clauses) or not all(all(clause) for clause in clauses):
            raise EngineInputError("A query of clauses has none, or one without terms or tokens.")
        return {
            "cnf": clauses,
            "max_clause_freq": bounded("max_clause_freq", max_clause_freq, 1),
            "max_diff_tokens": bounded("max_diff_tokens", max_diff_tokens, 1),
        }

    def _threads_of(self, cnf: Cnf) -> int:
        """Threads that the package starts for clauses at the same time: one for each clause, one for
        each term, and one for each shard of a term."""
        return len(cnf) + sum(map(len, cnf)) * (1 + self.shard_count)


def _pointers(span: Any) -> list[tuple[int, int]]:
    return [(place.s, place.ptr) for place in span.docs]


def _checked(answer: Any) -> Any:
    if isinstance(answer, dict) and "error" in answer:
        raise EngineError(f"infini-gram: {answer['error']}")
    return answer


def bounded(name: str, value: int, low: int, high: int = MAX_TOKENS) -> int:
    if type(value) is not int or not low <= value <= high:
        raise EngineInputError(f"{name} must be an integer from {low} to {high}, not {value!r}.")
    return value
