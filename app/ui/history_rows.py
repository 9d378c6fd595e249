"""The rows of `/history` and `/system` as series for plots: a value for each step, or none."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from app.ui.charts import Series
from app.ui.render import to_time

Row = Mapping[str, Any]


# Steps that fit into a plot.
_MAX_STEPS = 120


def steps(now: datetime, minutes: int, rows: Sequence[Row] = ()) -> list[datetime]:
    """The beginnings of the steps of the last minutes, as wide as those of the rows."""
    row_minutes = rows[0]["minutes"] if rows else 1
    width = 60 * row_minutes * -(-minutes // (row_minutes * _MAX_STEPS))
    last = floor(now, width)
    count = max(60 * minutes // width, 2)
    return [last - timedelta(seconds=place * width) for place in reversed(range(count))]


def floor(time: datetime, seconds: float) -> datetime:
    return datetime.fromtimestamp(time.timestamp() // seconds * seconds, UTC)


def series(
    name: str,
    times: Sequence[datetime],
    rows: Iterable[Row],
    value: Callable[[Sequence[Row]], float | None],
    absent: float | None = None,
) -> Series:
    """One value for each step: `value` of its rows; `absent` for a step without rows."""
    width = (times[1] - times[0]).total_seconds()
    by_step: dict[datetime, list[Row]] = defaultdict(list)
    for row in rows:
        by_step[floor(to_time(row["minute"]), width)].append(row)
    return Series(name, [value(by_step[time]) if time in by_step else absent for time in times])


def total(member: str) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: sum(row[member] or 0 for row in rows)


def worst(member: str) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: max((row[member] for row in rows if row[member] is not None), default=None)
