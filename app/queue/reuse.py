"""Exact reuse: a new result is completed by the text of an equal one, in the transaction that stores it.

A result that permits it has a digest of its request. Its source is a completed result of its team with the
same digest and model version (docs/reuse.md). No attempt runs, so that nothing is counted twice.
"""

from collections.abc import Sequence
from uuid import UUID

from app.core.database import Connection
from app.core.listener import ENDED
from app.queue.enqueue import NewResult, enqueue
from app.queue.notifications import NOTIFY_DELIVERIES, notify_ids
from app.queue.terminal_state import MAX_BATCH, end_sql


def _is_source_sql(new: str) -> str:
    """Condition: the result `s` may answer `new`. A reused result answers no other: its source may be gone.

    Nor does one whose prompt retention has erased: it would show that this prompt was sent.
    """
    return f"""s.team_id = {new}.team_id AND s.reuse_digest = {new}.reuse_digest
      AND s.model_version IS NOT DISTINCT FROM {new}.model_version
      AND s.state = 'completed' AND s.reused_from IS NULL AND s.store AND s.erased_at IS NULL
      AND (SELECT c.erased_at FROM contexts c WHERE c.id = s.context_id) IS NULL"""


# LATERAL and LIMIT: each digest is looked up by itself. A join may read all results.
_HAS_SOURCES = f"""
SELECT EXISTS (
  SELECT FROM unnest($1::text[], $2::bytea[], $3::int[]) AS i(team_id, reuse_digest, model_version)
  CROSS JOIN LATERAL (SELECT FROM results s WHERE {_is_source_sql("i")} LIMIT 1) s)
"""
# OFFSET 0: each result is found by its id alone. By its state, all that waits may be read. One that is sent
# again may have been claimed: it is held before its state, its worker and its attempt are looked at.
_COMPLETE = f"""
WITH judged AS MATERIALIZED (
  SELECT r.id, s.*, 'completed' AS verdict, NULL::float8 AS first_token_seconds, false AS lost,
    false AS engine_died, false AS continued, NULL::bigint AS continued_from,
    NULL::text AS error_code, NULL::text AS error_message, NULL::bool AS error_retryable
  FROM unnest($1::uuid[]) AS i(id) CROSS JOIN LATERAL (
    SELECT id, team_id, reuse_digest, model_version, state, worker_id, attempt
    FROM results WHERE id = i.id OFFSET 0 FOR UPDATE
  ) r CROSS JOIN LATERAL (
    SELECT s.id AS source_id, s.output, s.finish_reason, s.logprobs, s.prompt_logprobs,
      s.prompt_tokens, s.completion_tokens, s.model_version, NULL::bytea AS vector
    FROM results s WHERE {_is_source_sql("r")} ORDER BY s.id DESC LIMIT 1
  ) s
  WHERE r.state = 'pending' AND r.worker_id IS NULL AND r.attempt = 0
), {end_sql(sets="reused_from = j.source_id")}
SELECT count(*), {notify_ids(ENDED)}, {NOTIFY_DELIVERIES} FROM ended
"""


async def has_sources(connection: Connection, results: Sequence[NewResult]) -> bool:
    """Return whether one of the results has a source."""
    some = [one for one in results if one.reuse_digest is not None]
    digests = [one.reuse_digest for one in some]
    versions = [one.model_version for one in some]
    teams = [one.team_id for one in some]
    found: bool = await connection.fetchval(_HAS_SOURCES, teams, digests, versions)
    return found


async def enqueue_reused(
    connection: Connection, results: Sequence[NewResult], resent: bool
) -> list[bool]:
    """Commit new results, those with a source as completed; whether each is stored.

    The others wait for a worker: no claim sees a result before it is completed.
    """
    # In the order in which all lock results.
    ids: list[UUID] = sorted(one.id for one in results if one.reuse_digest is not None)
    async with connection.transaction():
        stored = await enqueue(connection, results, None, resent=resent)
        for start in range(0, len(ids), MAX_BATCH):
            await connection.fetch(_COMPLETE, ids[start : start + MAX_BATCH])
    return stored
