"""History by the minute: ended results with their durations, and the lengths of queues.

Read from `minute_stats` and `queue_samples`, which `ResultIndexer` writes: the rows of results are
not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.core.database import Database
from app.results.stats import histogram

MAX_MINUTES = 1_440
_MAX_POINTS = 120
_STEPS = (1, 2, 5, 10, 15)  # minutes
_FAILURES = 50  # codes; there are fewer
_SAMPLES = 20_000


def _sum_of(name: str) -> str:
    """A histogram's sum, bucket by bucket: one pass, unlike an unnested one."""
    sums = (
        f"coalesce(sum({name}[{place}]) FILTER (WHERE ended_as = 'completed'), 0)::int"
        for place in range(1, histogram.SIZE + 1)
    )
    return f"ARRAY[{', '.join(sums)}] AS {name}"


_BIN = "date_bin(make_interval(mins => $2), minute, timestamptz '2000-01-01T00:00Z')"
_POINTS = f"""
SELECT {_BIN} AS begins, model_name,
  coalesce(sum(results) FILTER (WHERE ended_as = 'completed'), 0)::bigint AS completed,
  coalesce(sum(results) FILTER (WHERE ended_as <> 'completed'), 0)::bigint AS failed,
  sum(prompt_tokens)::bigint AS prompt_tokens, sum(completion_tokens)::bigint AS completion_tokens,
  {_sum_of("queue_seconds")}, {_sum_of("first_token_seconds")}, {_sum_of("seconds")}
FROM minute_stats WHERE minute >= $1 {{condition}}
GROUP BY begins, model_name ORDER BY begins, model_name
"""
_SINCE = """
SELECT date_bin(make_interval(mins => $2), now(), timestamptz '2000-01-01T00:00Z')
  - make_interval(mins => $1) AS since
"""
_BY_CODE = f"""
SELECT ended_as AS code, sum(results)::bigint AS count FROM minute_stats
WHERE minute >= $1 AND ended_as <> 'completed' GROUP BY code ORDER BY count DESC, code
LIMIT {_FAILURES}
"""
_QUEUES = f"""
SELECT {_BIN} AS begins, name, max(queued) AS queued, max(running) AS running FROM queue_samples
WHERE minute >= $1 GROUP BY begins, name ORDER BY begins, name LIMIT {_SAMPLES}
"""


@dataclass(slots=True, frozen=True)
class Window:
    """The last minutes, cut into steps; the last step is still open."""

    since: datetime
    step: int  # minutes


@dataclass(slots=True, frozen=True)
class Point:
    """Ended results of one model in one step; durations in seconds, as histograms."""

    begins: datetime
    model_name: str
    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    queue_seconds: Sequence[int]
    first_token_seconds: Sequence[int]
    seconds: Sequence[int]


@dataclass(slots=True, frozen=True)
class FailureCount:
    code: str
    count: int


@dataclass(slots=True, frozen=True)
class QueueSample:
    """The most that a queue held, queued and running, at a full minute of a step."""

    begins: datetime
    name: str
    queued: int
    running: int


class HistoryStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def window(self, minutes: int) -> Window:
        """The last minutes, by the database's clock, in 120 steps at most."""
        step = next(one for one in _STEPS if minutes <= one * _MAX_POINTS)
        whole = -(-minutes // step) * step
        (row,) = await self._database.fetch(_SINCE, whole, step)
        return Window(row["since"] + timedelta(minutes=step), step)

    async def points(
        self, window: Window, team_id: str | None, model_name: str | None = None
    ) -> list[Point]:
        """Ended results by step and model, oldest first; of a team, or of all for None."""
        arguments: list[object] = [window.since, window.step]
        condition = ""
        for column, value in (("team_id", team_id), ("model_name", model_name)):
            if value is not None:
                arguments.append(value)
                condition += f" AND {column} = ${len(arguments)}"
        rows = await self._database.fetch(_POINTS.format(condition=condition), *arguments)
        return [Point(**row) for row in rows]

    async def failures(self, window: Window) -> list[FailureCount]:
        rows = await self._database.fetch(_BY_CODE, window.since)
        return [FailureCount(**row) for row in rows]

    async def queues(self, window: Window) -> list[QueueSample]:
        rows = await self._database.fetch(_QUEUES, window.since, window.step)
        return [QueueSample(**row) for row in rows]
