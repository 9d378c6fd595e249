"""Rates per minute, shared by all processes: token buckets in the database.

A bucket holds at most one minute's worth and fills steadily. A request takes what it costs from
all of its buckets, or is refused and takes nothing. https://en.wikipedia.org/wiki/Token_bucket
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.database import Connection

MAX_REQUESTS = 1000  # that share a transaction
_MINUTE = 60.0

_FILL = """
INSERT INTO rate_buckets AS b (team_id, model_name, name, level, filled_at)
SELECT team_id, model_name, name, capacity, clock_timestamp()
FROM unnest($1::text[], $2::text[], $3::text[], $4::float8[])
  AS i(team_id, model_name, name, capacity)
-- In one order, so that no two statements wait for each other.
ORDER BY 1, 2, 3
ON CONFLICT (team_id, model_name, name) DO UPDATE SET
  level = least(excluded.level, b.level + excluded.level / 60.0 *
    greatest(0, extract(epoch FROM excluded.filled_at - b.filled_at)::float8)),
  filled_at = greatest(b.filled_at, excluded.filled_at)
RETURNING team_id, model_name, name, level, pg_current_xact_id()::text AS transaction
"""

_TAKE = """
UPDATE rate_buckets b SET level = i.level
FROM unnest($1::text[], $2::text[], $3::text[], $4::float8[])
  AS i(team_id, model_name, name, level)
WHERE b.team_id = i.team_id AND b.model_name = i.model_name AND b.name = i.name
"""

# A transaction of a server that failed over may be missing, and its number another's: later ones are not
# looked up.
_IS_COMMITTED = """
SELECT CASE WHEN $1::text::xid8 < pg_current_xact_id()
  THEN pg_xact_status($1::text::xid8) = 'committed' END
"""

Bucket = tuple[str, str, str]  # team, model, name


@dataclass(slots=True, frozen=True)
class Cost:
    """The cost of a request in one bucket, which holds `capacity` a minute."""

    bucket: Bucket
    capacity: float
    amount: float


@dataclass(slots=True, frozen=True)
class Shortage:
    """A cost that exceeds its bucket, and the seconds until it does not."""

    cost: Cost
    seconds: float


@dataclass(slots=True, frozen=True)
class _Taking:
    """A transaction that may have been committed although its connection was lost."""

    requests: Sequence[Sequence[Cost]]
    transaction: str
    answers: Sequence[Shortage | None]


class RateBuckets:
    """The takings of one process: one statement at a time."""

    def __init__(self) -> None:
        self._last: _Taking | None = None

    async def take(
        self, connection: Connection, requests: Sequence[Sequence[Cost]], resent: bool
    ) -> Sequence[Shortage | None]:
        """Take all that a request costs, or return its first shortage and take nothing.

        A request that costs more than a full bucket passes when it is full, and leaves it empty
        for as long as that takes; otherwise it would never pass. `resent` requests whose COMMIT lost its
        connection take nothing again if they were committed.
        """
        capacities = {cost.bucket: cost.capacity for costs in requests for cost in costs}
        columns = [list(column) for column in zip(*capacities, strict=True)]
        async with connection.transaction():
            # It waits for a lost transaction that still holds the rows.
            rows = await connection.fetch(_FILL, *columns, list(capacities.values()))
            if resent and (answers := await self._committed(connection, requests)) is not None:
                return answers
            levels = {
                (row["team_id"], row["model_name"], row["name"]): row["level"] for row in rows
            }
            answers = [_take_one(levels, costs) for costs in requests]
            taken = [list(column) for column in zip(*levels, strict=True)]
            await connection.execute(_TAKE, *taken, list(levels.values()))
            self._last = _Taking(requests, rows[0]["transaction"], answers)
        return answers

    async def _committed(
        self, connection: Connection, requests: Sequence[Sequence[Cost]]
    ) -> Sequence[Shortage | None] | None:
        last = self._last
        if last is None or not _are_same(last.requests, requests):
            return None
        is_committed = await connection.fetchval(_IS_COMMITTED, last.transaction)
        return last.answers if is_committed else None


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _take_one(levels: dict[Bucket, float], costs: Sequence[Cost]) -> Shortage | None:
    for cost in costs:
        missing = min(cost.amount, cost.capacity) - levels[cost.bucket]
        if missing > 0:
            return Shortage(cost, missing / cost.capacity * _MINUTE)
    for cost in costs:
        levels[cost.bucket] -= cost.amount
    return None
