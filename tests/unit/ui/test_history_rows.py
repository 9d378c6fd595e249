"""Rows of the history as values of a plot."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from app.ui.history_rows import series, steps, total, worst

NOW = datetime(2026, 3, 1, 12, 34, 56, tzinfo=UTC)


def row(minutes_ago: int, **members: Any) -> dict[str, Any]:
    minute = NOW.replace(second=0) - timedelta(minutes=minutes_ago)
    return {"minute": minute.isoformat(), "minutes": 1, "count": None} | members


@pytest.mark.parametrize(
    ("minutes", "reported", "width", "count"),
    [(60, 1, 1, 60), (360, 5, 5, 72), (1440, 15, 15, 96), (1440, 1, 12, 120), (360, 1, 3, 120)],
)
def test_steps_are_few_and_as_wide_as_the_rows(
    minutes: int, reported: int, width: int, count: int
) -> None:
    found = steps(NOW, minutes, [row(0, minutes=reported)])
    assert len(found) == count
    assert {after - before for before, after in pairwise(found)} == {timedelta(minutes=width)}
    assert found[-1] <= NOW < found[-1] + timedelta(minutes=width)


def test_without_rows_there_are_steps_all_the_same() -> None:
    assert len(steps(NOW, 60)) == 60


def test_values_are_those_of_their_step() -> None:
    times = steps(NOW, 3)
    rows = [row(0, count=1), row(0, count=5), row(2), row(99, count=7)]
    assert series("a", times, rows, total("count"), 0).values == [0, 0, 6]
    assert series("a", times, rows, worst("count")).values == [None, None, 5]


def test_rows_finer_than_a_step_are_taken_together() -> None:
    times = [NOW.replace(minute=minute, second=0) for minute in (20, 30)]
    rows = [row(place, count=1) for place in range(12)]  # 12:34 to 12:23
    assert series("a", times, rows, total("count")).values == [7, 5]
