"""Next tokens after a place, counted from a sample: the package's algorithm, on the caller's thread.

The package (`_get_freq_by_token_id_approx` in its cpp_engine.h) halves the range of ranks and starts a
thread for either half: up to a thread for each sampled place. When the system refuses one, the package
ends the process.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

# A range of at most so many units is read; a larger one is halved.
_MAX_UNITS_READ = 4

_T = TypeVar("_T")


def sampling_unit(places: int, max_support: int) -> int:
    """Places that one sampled place stands for: a power of two."""
    unit = 1
    while places > unit * max_support:
        unit *= 2
    return unit


def count_next_tokens(
    token_at: Callable[[int], _T], start: int, end: int, unit: int
) -> Counter[_T]:
    """Count the next tokens of the ranks [start, end), of which `token_at` is sorted; it may block."""
    counts: Counter[_T] = Counter()
    ranges: list[tuple[int, int]] = [(start, end)]
    while ranges:
        start, end = ranges.pop()
        if end - start < _MAX_UNITS_READ * unit:
            for rank in range(start, end, unit):
                places = min(unit, end - rank)
                counts[token_at(rank + places // 2)] += places
        elif (first := token_at(start)) == token_at(end - 1):
            counts[first] += end - start
        else:
            middle = (start + end) // 2
            ranges += [(start, middle), (middle, end)]
    return counts
