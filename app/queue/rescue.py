"""Rescue of the results of dead workers, and expiry of those that wait past their deadline."""

from collections.abc import Sequence
from uuid import UUID

from app.core.database import Connection
from app.core.errors import WORKER_LOST
from app.core.listener import ENDED, ENQUEUED
from app.core.settings import Settings
from app.queue.notifications import NOTIFY_DELIVERIES, notify_ids
from app.queue.suspects import pause_suspects, running_suspects
from app.queue.terminal_state import (
    JUDGE_UNCLAIMED,
    MAX_BATCH,
    NO_ANSWER,
    OF_TEXT,
    conclude_sql,
    end_sql,
    notify_concluded,
    sweep_sql,
)

# A lease that is over, or longer than any (LLM_LEASE_SECONDS is ten minutes at most): it was not
# renewed since the clock was set back.
_LOST_WORKERS = """
SELECT id FROM workers
WHERE dead_at IS NULL
  AND (lease_expires_at < now() OR lease_expires_at > now() + interval '20 minutes')
  AND pg_postmaster_start_time() + make_interval(secs => $1) < now()
ORDER BY id LIMIT 10 FOR UPDATE SKIP LOCKED
"""
_MARK_DEAD = "UPDATE workers SET dead_at = now() WHERE id = ANY($1::uuid[])"
# A claim under way holds a weaker lock, for which the update alone would not wait: its results must be
# there to be released.
_RETIRE = """
UPDATE workers SET dead_at = coalesce(dead_at, now())
WHERE id = (SELECT id FROM workers WHERE id = $1 FOR UPDATE)
"""
# One probe for each owner of results, however long ago it died, or was removed: a release may fail.
_DEAD_OWNERS = """
WITH RECURSIVE owners AS (
  (SELECT worker_id FROM results WHERE state = 'pending' AND worker_id IS NOT NULL
   ORDER BY worker_id LIMIT 1)
  UNION ALL
  SELECT n.worker_id FROM owners o CROSS JOIN LATERAL (
    SELECT r.worker_id FROM results r
    WHERE r.state = 'pending' AND r.worker_id IS NOT NULL AND r.worker_id > o.worker_id
    ORDER BY r.worker_id LIMIT 1) n
)
SELECT o.worker_id AS id FROM owners o LEFT JOIN workers w ON w.id = o.worker_id
WHERE w.id IS NULL OR w.dead_at IS NOT NULL
"""

# The name of the connection that renews a worker's lease. The kernel closes it with the process; it
# stays where the worker is frozen, or the network or its host is gone.
_SESSION = "llm worker "

# The results of dead workers ($1), whose text is in the chunks. $2: whether the attempts count. A
# result may be the cause where its worker's process is gone, and an earlier attempt was lost, too.
# $4: whether their text may be continued; $5: also where ids of tokens are missing.
_RELEASE = f"""
WITH living AS MATERIALIZED (
  SELECT w.id FROM unnest($1::uuid[]) AS w(id)
  JOIN pg_stat_activity a ON a.application_name = '{_SESSION}' || w.id
), picked AS MATERIALIZED (
  -- In no order: ordered by id, the planner walks all results in the hope of a common owner.
  SELECT id FROM results
  WHERE worker_id = ANY($1::uuid[]) AND state = 'pending' LIMIT {MAX_BATCH}
), judged AS (
  SELECT r.id, $2::bool AS lost,
    $2::bool AND r.lost_attempts > 0 AND NOT EXISTS (
      SELECT FROM living l WHERE l.id = r.worker_id) AS engine_died,
    CASE
      WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
      WHEN r.deadline_at <= now() THEN 'expired'
      -- Its client reads a stream that cannot begin again, or has disconnected.
      WHEN $2::bool AND (r.lost_attempts + 1 >= $3::int OR r.on_disconnect = 'cancel')
        THEN 'worker_lost'
      ELSE 'requeued' END AS verdict,
    coalesce((SELECT string_agg(c.text, '' ORDER BY c."offset") FROM result_chunks c
              WHERE {OF_TEXT}), '') AS output,
    (SELECT max(c.prompt_tokens) FROM result_chunks c WHERE {OF_TEXT}) AS prompt_tokens,
    (SELECT max(c.completion_tokens) FROM result_chunks c WHERE {OF_TEXT}) AS completion_tokens,
    $4::bool AND ($5::bool OR (
      SELECT coalesce(sum(octet_length(c.token_ids)), 0) = 4 * coalesce(max(c.completion_tokens), 0)
      FROM result_chunks c WHERE {OF_TEXT})) AS keeps_text,
    r.text_attempt IS NOT NULL AND EXISTS (SELECT FROM result_chunks c
      WHERE c.result_id = r.id AND c.attempt = r.attempt) AS continued,
    (SELECT max(c."offset" + char_length(c.text)) FROM result_chunks c
     WHERE {OF_TEXT} AND c.attempt < r.attempt) AS continued_from,
    {NO_ANSWER}, CASE WHEN $2::bool THEN '{WORKER_LOST.code}' END AS error_code,
    'The worker stopped renewing its lease.' AS error_message, NULL::bool AS error_retryable
  FROM picked p JOIN results r ON r.id = p.id
  WHERE r.worker_id = ANY($1::uuid[]) AND r.state = 'pending'
  ORDER BY r.id FOR UPDATE OF r
), {conclude_sql()}
SELECT count(*), CASE WHEN count(*) > 0 THEN pg_notify('{ENQUEUED}', '') END, {notify_concluded()}
FROM concluded
"""

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

_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


def session_name(worker_id: UUID) -> str:
    """Return the `application_name` of the connection that renews a worker's lease."""
    return f"{_SESSION}{worker_id}"


async def mark_lost_workers(connection: Connection, lease_seconds: float) -> None:
    """Mark workers dead whose lease ran out, unless the server is younger than a lease."""
    async with connection.transaction():
        lost = [row["id"] for row in await connection.fetch(_LOST_WORKERS, lease_seconds)]
        if lost:
            await connection.execute(_MARK_DEAD, lost)


async def dead_owners(connection: Connection) -> list[UUID]:
    """Return the dead workers that still own results, since a rescuer may die, too."""
    return [row["id"] for row in await connection.fetch(_DEAD_OWNERS)]


async def release_some(
    connection: Connection, worker_ids: Sequence[UUID], settings: Settings, *, counted: bool
) -> int:
    """Release results of dead workers; how many. Suspects among them leave their models to others."""
    continues = settings.continue_lost_attempts, settings.continue_by_text
    arguments = worker_ids, counted, settings.max_attempts, *continues
    async with connection.transaction():
        ran_alone = await running_suspects(connection, worker_ids)
        count: int = await connection.fetchval(_RELEASE, *arguments)
        for model, team_id, seconds in ran_alone:
            await pause_suspects(connection, model, team_id, seconds)
    return count


async def retire(connection: Connection, worker_id: UUID, settings: Settings) -> int:
    """Release a worker's results in one transaction, so that no attempt counts; how many."""
    async with connection.transaction():
        await connection.execute(_RETIRE, worker_id)
        released = 0
        while count := await release_some(connection, [worker_id], settings, counted=False):
            released += count
        return released


async def expire_some(connection: Connection) -> int:
    count: int = await connection.fetchval(_EXPIRE)
    return count


async def clock(connection: Connection) -> float:
    """Return the database's clock, in seconds since 1970."""
    seconds: float = await connection.fetchval(_CLOCK)
    return seconds
