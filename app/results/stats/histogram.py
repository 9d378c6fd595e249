"""Durations as counts in fixed buckets, each twice as wide as the one before, and back.

Buckets can be added up over minutes, models and teams; percentiles cannot. The price is that a
percentile is known to its bucket alone, and interpolated within.
"""

from bisect import bisect_right
from collections.abc import Sequence

# Upper bounds in seconds, exclusive: 1 ms, 2 ms, 4 ms ... 3.1 days; one bucket more for what is
# above.
BOUNDS: tuple[float, ...] = tuple(0.001 * (1 << place) for place in range(29))
SIZE = len(BOUNDS) + 1


def bucket_of(seconds: float) -> int:
    """The bucket of a duration; a negative one, from differing clocks, counts as zero."""
    return bisect_right(BOUNDS, seconds)


def add(counts: list[int], more: Sequence[int]) -> None:
    for place, count in enumerate(more):
        counts[place] += count


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Seconds that a share (0 to 1) did not exceed, interpolated; None of no counts."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for place, count in enumerate(counts[:-1]):
        if below + count >= wanted:
            low = BOUNDS[place - 1] if place else 0.0
            return low + (BOUNDS[place] - low) * (wanted - below) / count
        below += count
    return BOUNDS[-1]
