"""Durations in buckets, and the percentiles that are read from them."""

import pytest

from app.results.stats.histogram import BOUNDS, SIZE, add, bucket_of, percentile


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(-1.0, 0), (0.0, 0), (0.000999, 0), (0.001, 1), (0.0019, 1), (0.002, 2), (1e9, SIZE - 1)],
)
def test_a_bound_belongs_to_the_bucket_above_it(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


def counts(**places: int) -> list[int]:
    found = [0] * SIZE
    for name, count in places.items():
        found[int(name[1:])] = count
    return found


def test_counts_add_up_by_bucket() -> None:
    total = counts(b0=1, b3=2)
    add(total, counts(b3=5, b4=1))
    assert total == counts(b0=1, b3=7, b4=1)


@pytest.mark.parametrize(
    ("places", "share", "seconds"),
    [
        ({}, 0.5, None),
        ({"b5": 4}, 0.0, None),
        ({"b0": 4}, 0.5, 0.0005),
        ({"b0": 4}, 1.0, 0.001),
        ({"b2": 4}, 0.25, 0.0025),  # between 2 ms and 4 ms
        ({"b2": 4}, 1.0, 0.004),
        ({"b2": 2, "b5": 2}, 0.5, 0.004),
        ({"b2": 2, "b5": 2}, 0.75, 0.024),  # between 16 ms and 32 ms
        ({"b29": 1}, 0.5, BOUNDS[-1]),  # above all bounds
        ({"b0": 1, "b29": 1}, 0.5, 0.001),
    ],
)
def test_a_percentile_is_interpolated_in_its_bucket(
    places: dict[str, int], share: float, seconds: float | None
) -> None:
    found = percentile(counts(**places), share)
    assert found == (None if seconds is None else pytest.approx(seconds))
