"""Cancellation: unclaimed results end at once; running ones are marked for their worker to stop."""

from collections.abc import Sequence
from uuid import UUID

from app.core.database import Connection
from app.core.listener import CANCELLED, ENDED
from app.queue.notifications import NOTIFY_DELIVERIES, notify_ids
from app.queue.terminal_state import JUDGE_UNCLAIMED, MAX_BATCH, end_sql, sweep_sql


def _cancel_sql(condition: str) -> str:
    return f"""
WITH picked AS (
  SELECT id, worker_id, attempt, text_attempt FROM results WHERE {condition} AND state = 'pending'
  ORDER BY id LIMIT {MAX_BATCH} FOR UPDATE
), marked AS (
  UPDATE results r SET cancel_requested_at = coalesce(r.cancel_requested_at, now())
  FROM picked p WHERE r.id = p.id AND p.worker_id IS NOT NULL
  RETURNING r.id
), judged AS (
  SELECT 'cancelled' AS verdict, {JUDGE_UNCLAIMED}
), {end_sql()}, {sweep_sql("SELECT id FROM ended")}, cancelled AS (
  SELECT id, true AS has_ended FROM ended UNION ALL SELECT id, false FROM marked
)
SELECT count(*), {notify_ids(ENDED, "has_ended")}, {notify_ids(CANCELLED, "NOT has_ended")},
  {NOTIFY_DELIVERIES}
FROM cancelled
"""


_CANCEL_IDS = _cancel_sql("team_id = $1 AND id = ANY($2::uuid[])")
_CANCEL_OF_ANY_TEAM = _cancel_sql("id = ANY($1::uuid[])")
_NOTIFY_STOPPED = (
    f"SELECT {notify_ids(CANCELLED)}, {notify_ids(ENDED)} FROM unnest($1::uuid[]) i(id)"
)


async def cancel_some(connection: Connection, team_id: str, filters: dict[str, object]) -> int:
    """Cancel at most MAX_BATCH of a team's pending results by their columns; how many."""
    names = ["team_id", *filters]
    condition = " AND ".join(f"{name} = ${number}" for number, name in enumerate(names, 1))
    # A second pass finds only results not yet marked; one `id` needs no pass.
    condition += "" if "id" in filters else " AND cancel_requested_at IS NULL"
    count: int = await connection.fetchval(_cancel_sql(condition), team_id, *filters.values())
    return count


async def cancel_ids(connection: Connection, team_id: str, ids: Sequence[UUID]) -> None:
    for start in range(0, len(ids), MAX_BATCH):
        await connection.fetch(_CANCEL_IDS, team_id, ids[start : start + MAX_BATCH])


async def cancel_of_any_team(connection: Connection, ids: Sequence[UUID]) -> None:
    for start in range(0, len(ids), MAX_BATCH):
        await connection.fetch(_CANCEL_OF_ANY_TEAM, ids[start : start + MAX_BATCH])


async def notify_stopped(connection: Connection, ids: Sequence[UUID]) -> None:
    for start in range(0, len(ids), MAX_BATCH):
        await connection.fetch(_NOTIFY_STOPPED, ids[start : start + MAX_BATCH])
