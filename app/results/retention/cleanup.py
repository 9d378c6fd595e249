"""Removal of old records and of remains that no other code removes."""

from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from uuid import UUID

from app.core.database import Connection
from app.core.ids import lowest_id
from app.core.settings import Settings

_MAX_ROWS = 500  # rows of a transaction
_WORKER_DAYS = 7
_BUCKET_DAYS = 1  # a bucket is full again after a minute: a missing row is a full one

Step = Callable[[Connection], Awaitable[bool]]

# Deliveries have the ids of their results, which hold the time of creation. An old result that ended
# recently is removed by a later pass.
_DELIVERIES = """
WITH page AS MATERIALIZED (
  SELECT result_id, state, finished_at FROM webhook_deliveries
  WHERE result_id > $1 AND result_id < $2 ORDER BY result_id LIMIT $3
), gone AS (
  DELETE FROM webhook_deliveries WHERE result_id = ANY (ARRAY(
    SELECT d.result_id FROM webhook_deliveries d
    WHERE d.result_id = ANY (ARRAY(SELECT result_id FROM page WHERE finished_at <= $4))
      AND d.finished_at <= $4
    ORDER BY d.result_id FOR UPDATE SKIP LOCKED))
)
SELECT count(*) AS count, max(result_id::text)::uuid AS last FROM page
"""
# Chunks that a worker wrote while its attempt was being rescued: without a result, or of an ended one.
# One probe for each result that has any.
_CHUNKS = """
WITH RECURSIVE page AS (
  (SELECT result_id, 1 AS place FROM result_chunks WHERE result_id > $1 ORDER BY result_id LIMIT 1)
  UNION ALL
  SELECT n.result_id, p.place + 1 FROM page p CROSS JOIN LATERAL (
    SELECT c.result_id FROM result_chunks c WHERE c.result_id > p.result_id
    ORDER BY c.result_id LIMIT 1) n
  WHERE p.place < $2
), gone AS (
  DELETE FROM result_chunks WHERE result_id = ANY (ARRAY(
    SELECT p.result_id FROM page p LEFT JOIN results r ON r.id = p.result_id
    WHERE r.id IS NULL OR r.state <> 'pending'))
)
SELECT count(*) AS count, max(result_id::text)::uuid AS last FROM page
"""
_ROWS = """
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM {table} t WHERE {condition} LIMIT $2 FOR UPDATE SKIP LOCKED))
"""
_WORKERS = _ROWS.format(
    table="workers",
    condition="""dead_at <= $1 AND NOT EXISTS (
      SELECT FROM results r WHERE r.worker_id = t.id AND r.state = 'pending')""",
)
_LAUNCHES = _ROWS.format(table="launches", condition="ended_at <= $1")
_DOWNLOADS = _ROWS.format(table="model_downloads", condition="ended_at <= $1")
_USAGE = _ROWS.format(
    table="usage_days", condition="day < ($1::timestamptz AT TIME ZONE 'UTC')::date"
)
# An alert of this month must stay, or it would be sent again.
_ALERTS = _ROWS.format(
    table="budget_alerts",
    condition="""created_at <= $1 AND state <> 'pending'
      AND month < (now() AT TIME ZONE 'UTC')::date - 31""",
)
_BUCKETS = _ROWS.format(table="rate_buckets", condition="filled_at <= $1")


def cleaning_steps(settings: Settings, now: datetime) -> Iterator[Step]:
    """Transactions, one for each kind of remains, to be repeated while they return True."""
    logs = now - timedelta(days=settings.logs_retention_days)
    yield _walk(_DELIVERIES, lowest_id(logs), _MAX_ROWS, logs)
    yield _walk(_CHUNKS, _MAX_ROWS)
    yield _delete(_LAUNCHES, logs)
    yield _delete(_DOWNLOADS, logs)
    yield _delete(_ALERTS, logs)
    yield _delete(_WORKERS, now - timedelta(days=_WORKER_DAYS))
    yield _delete(_BUCKETS, now - timedelta(days=_BUCKET_DAYS))
    yield _delete(_USAGE, now - timedelta(days=settings.usage_retention_days))


def _walk(statement: str, *arguments: object) -> Step:
    """A step over pages of rows; the statement takes the last id and returns the next one."""
    after = UUID(int=0)

    async def step(connection: Connection) -> bool:
        nonlocal after
        row = await connection.fetchrow(statement, after, *arguments)
        assert row is not None
        after = row["last"] or after
        return bool(row["count"] == _MAX_ROWS)

    return step


def _delete(statement: str, before: datetime) -> Step:
    async def step(connection: Connection) -> bool:
        return await connection.execute(statement, before, _MAX_ROWS) == f"DELETE {_MAX_ROWS}"

    return step
