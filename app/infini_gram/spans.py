"""The longest parts of a text that occur in an index, by the package's rules and on the caller's thread."""

from collections.abc import Callable, Iterator, Set

from app.infini_gram.engine_types import Ids


def longest_spans(
    ids: Ids, occurs: Callable[[Ids], bool], delimiters: Set[int], word_starts: Set[int] | None
) -> Iterator[tuple[int, int]]:
    """The longest part [left, right) from each token on that occurs; it may be within an earlier one.

    It ends after its first delimiter. With `word_starts`, it begins with one of them, and ends before one
    or with the text. `occurs` must hold for each part of a sequence for which it holds.
    """
    ends = _ends(ids, word_starts)
    stops = _stops(ids, delimiters)
    reached = 0
    for left in range(len(ids)):
        if word_starts is not None and ids[left] not in word_starts:
            continue
        reached = _extend(ids, left, max(reached, left), occurs)
        right = ends[min(reached, stops[left])]
        if right > left:
            yield left, right


def _extend(ids: Ids, left: int, known: int, occurs: Callable[[Ids], bool]) -> int:
    """The end of the longest part from `left` on that occurs: at least `known`."""
    step, absent = 1, len(ids) + 1
    while known + 1 < absent:
        right = min(known + step, absent - 1)
        if occurs(ids[left:right]):
            known, step = right, 2 * step
        else:
            absent, step = right, max(1, (right - known) // 2)
    return known


def _ends(ids: Ids, word_starts: Set[int] | None) -> list[int]:
    """For each end of a part the last one up to it at which a part may end; 0 is one."""
    ends = list(range(len(ids) + 1))
    if word_starts is not None:
        for end in range(1, len(ids)):
            if ids[end] not in word_starts:
                ends[end] = ends[end - 1]
    return ends


def _stops(ids: Ids, delimiters: Set[int]) -> list[int]:
    """For each token the end of a part from it on that its first delimiter ends."""
    stops = [len(ids)] * len(ids)
    for place in reversed(range(len(ids))):
        if ids[place] in delimiters:
            stops[place] = place + 1
        elif place + 1 < len(ids):
            stops[place] = stops[place + 1]
    return stops
