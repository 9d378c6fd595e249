"""Attribution by the plainest code: every part of a text is looked for in every document.

Written from infini-gram API's behaviour alone (its attribution_worker and the engine that it calls),
with nothing of `app/infini_gram`: token ids and texts are given.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.index_files import Shard, stream_of, suffixes

Place = tuple[int, int]  # shard, pointer
_UNSEEN = -10_000.0


class Corpus:
    """Shards of documents, searched from beginning to end."""

    def __init__(self, shards: Sequence[Shard], width: int) -> None:
        self.shards = shards
        self.width = width
        self._ranks = [
            {pointer: rank for rank, pointer in enumerate(suffixes(stream_of(shard, width), width))}
            for shard in shards
        ]
        self._counts = Counter(token for shard in shards for text in shard for token in text.ids)
        self._total = self._counts.total() + sum(len(shard) for shard in shards)

    def places(self, needle: Sequence[int]) -> list[Place]:
        """The positions of the tokens, in the order of the suffix array."""
        found: list[Place] = []
        for number, shard in enumerate(self.shards):
            pointers, start = [], 0
            for text in shard:
                start += self.width  # the separator
                pointers += [
                    start + self.width * place
                    for place in range(len(text.ids) - len(needle) + 1)
                    if text.ids[place : place + len(needle)] == list(needle)
                ]
                start += self.width * len(text.ids)
            found += [
                (number, one) for one in sorted(pointers, key=self._ranks[number].__getitem__)
            ]
        return found

    def logprob(self, token: int) -> float:
        count = self._counts[token]
        return math.log(count) - math.log(self._total) if count else _UNSEEN

    def document(self, place: Place, length: int, context: int) -> dict[str, Any]:
        """The document at a place, and the tokens around it."""
        shard, pointer = place
        index = sum(len(one) for one in self.shards[:shard])
        begin = 0
        for text in self.shards[shard]:
            begin += self.width
            end = begin + self.width * len(text.ids)
            if begin <= pointer < end:
                needle = (pointer - begin) // self.width
                first = max(0, needle - context)
                window = text.ids[first : needle + length + context]
                return {
                    "documentIndex": index,
                    "documentLength": len(text.ids),
                    "displayLength": len(window),
                    "needleOffset": needle - first,
                    "metadata": text.metadata,
                    "tokenIds": window,
                }
            begin = end
            index += 1
        raise AssertionError(f"no document at {place}")


def spans_of(
    corpus: Corpus,
    ids: list[int],
    delimiters: set[int],
    word_starts: set[int],
    *,
    partial: bool,
    minimum: int,
    maximum: int,
) -> list[tuple[int, int, list[Place]]]:
    """The longest parts, none of them within another: left, right, places."""
    found, last = [], 0
    for left in range(len(ids)):
        if not partial and ids[left] not in word_starts:
            continue
        length = 0
        while left + length < len(ids) and corpus.places(ids[left : left + length + 1]):
            length += 1
        for n in range(length):
            if ids[left + n] in delimiters:
                length = n + 1
                break
        if not partial:
            while length and left + length < len(ids) and ids[left + length] not in word_starts:
                length -= 1
        if length < minimum:
            continue
        places = corpus.places(ids[left : left + length])
        if len(places) <= maximum and left + length > last:
            last = left + length
            found.append((left, last, places))
    return found


def attribute(
    corpus: Corpus,
    name: str,
    ids: list[int],
    pieces: Sequence[str],
    decode: Callable[[list[int]], str],
    delimiters: set[int],
    word_starts: set[int],
    wanted: dict[str, Any],
) -> dict[str, Any]:
    """The answer, of the request's members by their names on the wire."""
    spans = []
    for left, right, places in spans_of(
        corpus,
        ids,
        delimiters,
        word_starts,
        partial=wanted["allowSpansWithPartialWords"],
        minimum=wanted["minimumSpanLength"],
        maximum=wanted["maximumFrequency"],
    ):
        logprob = 0.0
        for token in ids[left:right]:
            logprob += corpus.logprob(token)
        spans.append((left, right, places, logprob))
    if wanted["spanRankingMethod"] == "length":
        spans.sort(key=lambda span: -(span[1] - span[0]))
    else:
        spans.sort(key=lambda span: span[3])
    spans = spans[: math.ceil(len(ids) * wanted["maximumSpanDensity"])]
    spans.sort()
    return {
        "index": name,
        "inputTokens": list(pieces),
        "spans": [
            {
                "left": left,
                "right": right,
                "length": right - left,
                "count": len(places),
                "unigramLogprobSum": logprob,
                "text": decode(ids[left:right]),
                "tokenIds": ids[left:right],
                "documents": [
                    _document(corpus, place, right - left, decode, wanted)
                    for place in _sample(places, wanted["maximumDocumentsPerSpan"])
                ],
            }
            for left, right, places, logprob in spans
        ],
    }


def _sample(places: list[Place], most: int) -> list[Place]:
    if len(places) <= most:
        return places
    random.seed(42)
    return random.sample(places, most)


def _document(
    corpus: Corpus,
    place: Place,
    length: int,
    decode: Callable[[list[int]], str],
    wanted: dict[str, Any],
) -> dict[str, Any]:
    whole = corpus.document(place, length, wanted["maximumContextLength"])
    # No other window shows the text that the first one has cut off.
    long = corpus.document(
        place, length, min(wanted["maximumContextLength"], wanted["maximumContextLengthLong"])
    )
    snippet = corpus.document(
        place, length, min(wanted["maximumContextLength"], wanted["maximumContextLengthSnippet"])
    )
    return {
        **whole,
        "text": decode(whole["tokenIds"]),
        "blocked": False,
        "displayLengthLong": long["displayLength"],
        "needleOffsetLong": long["needleOffset"],
        "textLong": decode(long["tokenIds"]),
        "displayOffsetSnippet": snippet["displayLength"],
        "needleOffsetSnippet": snippet["needleOffset"],
        "textSnippet": decode(snippet["tokenIds"]),
    }


def cut_text(text: str, offsets: list[tuple[int, int]]) -> list[str]:
    """The text of each token; the first ends where the second begins."""
    pieces = [text[start:end] for start, end in offsets]
    if len(offsets) > 1 and offsets[0][1] > offsets[1][0]:
        pieces[0] = text[offsets[0][0] : offsets[1][0]]
    return pieces
