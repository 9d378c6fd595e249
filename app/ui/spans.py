"""Positions of an attribution's spans in their text, and in the snippets of documents.

The API's spans are in tokens of the index, and each token has the piece of text that it covers; tokens
may share a character (many tokenizers split one into its bytes), and text that a tokenizer drops
belongs to none.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Characters that may lie between two tokens: those that a tokenizer's normalisation drops.
_MAX_GAP = 200
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Range = tuple[int, int]


class Segment(NamedTuple):
    """A part of the text that the same spans cover, by their places in the list of spans."""

    text: str
    spans: tuple[int, ...]


def locate(text: str, pieces: Sequence[str]) -> list[Range]:
    """The position of each piece in the text, in characters: [start, end).

    A piece that is not found has length 0.
    """
    ranges: list[Range] = []
    end = 0
    for piece, count in _runs(pieces):
        start = _find(text, piece, end, ranges[-1][0] if ranges else 0)
        if start is None or not piece:
            ranges += [(end, end)] * count
        elif count > 1:
            part = text[start : start + count]
            found = len(part) - len(part.lstrip(piece))
            # As many tokens as characters, or more: then each character has several.
            places = [start + one * found // count for one in range(count)]
            ranges += [(place, place + 1) for place in places]
            end = start + found
        else:
            end = start + len(piece)
            ranges.append((start, end))
    return ranges


def to_characters(ranges: Sequence[Range], left: int, right: int) -> Range:
    """The characters of tokens [left, right); of length 0 if there are no such tokens."""
    if not 0 <= left < right <= len(ranges):
        return (0, 0)
    return ranges[left][0], max(end for _, end in ranges[left:right])


def cut(text: str, spans: Sequence[Range]) -> list[Segment]:
    """The text in parts, each with the spans that cover it; they may overlap in any way."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for place, (start, end) in enumerate(spans):
        if start < end:
            begins.setdefault(start, []).append(place)
            ends.setdefault(end, []).append(place)
    segments = []
    covering: list[int] = []
    last = 0
    for border in sorted({*begins, *ends, len(text)}):
        if border > last:
            segments.append(Segment(text[last:border], tuple(covering)))
            last = border
        gone = set(ends.get(border, ()))
        covering = [place for place in covering if place not in gone] + begins.get(border, [])
    return segments


def split_at(snippet: str, needle: str, share: float) -> tuple[str, str, str]:
    """The snippet before, at and behind the needle; of several matches, the one nearest to `share`
    (0 to 1) of the snippet's length. (snippet, "", "") without a match.

    Characters that the needle has only in part (U+FFFD) do not count, and space at its ends only
    if the snippet has it: tokenizers put some before a text, and remove it.
    """
    needle = needle.strip(_REPLACEMENT)
    for wanted in (needle, needle.strip()):
        place = _nearest(snippet, wanted, share * len(snippet)) if wanted else -1
        if place >= 0:
            return snippet[:place], wanted, snippet[place + len(wanted) :]
    return snippet, "", ""


def _nearest(text: str, needle: str, expected: float) -> int:
    best = start = text.find(needle)
    while start >= 0:
        if abs(start - expected) < abs(best - expected):
            best = start
        start = text.find(needle, start + 1)
    return best


def _runs(pieces: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The pieces, with equal consecutive ones of a single character together."""
    for piece, equal in itertools.groupby(pieces):
        count = sum(1 for _ in equal)
        yield from [(piece, count)] if len(piece) == 1 else [(piece, 1)] * count


def _find(text: str, piece: str, end: int, previous: int) -> int | None:
    """Start of a piece: behind the piece before, with a character of it, or a little further."""
    if text.startswith(piece, end):
        return end
    for start in range(max(previous, end - 1), end):
        if text.startswith(piece, start):
            return start
    start = text.find(piece, end, end + _MAX_GAP + len(piece))
    return start if start >= 0 else None
