"""Expiry: queued results fail once their deadline has passed."""

from app.core.database import Connection
from app.core.listener import ENDED
from app.queue.conclude import JUDGE_UNCLAIMED, MAX_BATCH, end_sql, sweep_sql
from app.queue.notifications import NOTIFY_DELIVERIES, notify_ids

_EXPIRE = f"""
WITH picked AS MATERIALIZED (
  SELECT id, worker_id, attempt, text_attempt FROM results
  WHERE state = 'pending' AND worker_id IS NULL AND deadline_at <= now()
  ORDER BY deadline_at LIMIT {MAX_BATCH} FOR UPDATE SKIP LOCKED
), judged AS (
  SELECT 'expired' AS verdict, {JUDGE_UNCLAIMED}
), {end_sql()}, {sweep_sql("SELECT id FROM ended")}
SELECT count(*), {notify_ids(ENDED)}, {NOTIFY_DELIVERIES} FROM ended
"""


async def expire_some(connection: Connection) -> int:
    """Fail at most MAX_BATCH queued results past their deadline; how many."""
    count: int = await connection.fetchval(_EXPIRE)
    return count
