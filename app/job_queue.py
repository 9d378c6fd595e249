"""The queue: the only file that writes `results.state`.

The result row is the job. Every write names the state, the worker and the attempt it expects, so
a race becomes a row count of zero: somebody else decided, stop, write nothing. All times are the
database's clock. `docs/state_machine.md` draws the transitions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import orjson

from app.database import Connection, Database
from app.errors import CANCELLED, DEADLINE_EXCEEDED, ENGINE_CRASHED, WORKER_LOST, Failure
from app.group_commit import Lane
from app.idempotency import NewKey, take_keys_sql
from app.listener import (
    APPENDED,
    CANCELLED as CANCELLED_CHANNEL,
    ENDED,
    ENQUEUED,
    IDS_PER_NOTIFICATION,
    WEBHOOKS,
    join_ids,
)
from app.settings import Settings

# A result that was in flight at this many engine deaths runs alone from then on.
SUSPECT_DEATHS = 2
# One notification carries the ids of one statement.
MAX_BATCH = IDS_PER_NOTIFICATION
_MAX_ENQUEUE = 1000
_HISTORY_LIMIT = 20


@dataclass(slots=True, frozen=True)
class NewContext:
    """A prompt to store: plain `content`, or chat `messages` as JSON text; exactly one."""

    id: UUID
    team_id: str
    content: str | None
    messages: str | None
    metadata: str


@dataclass(slots=True, frozen=True)
class NewResult:
    """A validated request to enqueue; JSON members are JSON text."""

    id: UUID
    team_id: str
    context_id: UUID
    model_name: str
    parameters: str
    deadline_seconds: float
    model_version: int | None = None
    prompt: str | None = None
    priority: int = 0
    metadata: str = "{}"
    group_id: UUID | None = None
    retry_of: UUID | None = None
    new_context: NewContext | None = None
    webhook_url: str | None = None
    key: NewKey | None = None


@dataclass(slots=True, frozen=True)
class Claim:
    """One attempt that this worker may write, as claimed."""

    id: UUID
    attempt: int
    model_name: str
    prompt: str
    parameters: dict[str, Any]
    seconds_left: float
    is_suspect: bool


class Outcome(StrEnum):
    """How an attempt ended, as its worker saw it. The queue decides what becomes of the result."""

    COMPLETED = "completed"
    FAILED = "failed"
    LOST = "lost"  # Triton took the request, then the stream broke: counts as an attempt
    RETURNED = "returned"  # never taken, or handed back at shutdown: counts for nothing


@dataclass(slots=True, frozen=True)
class AttemptEnd:
    """The end of one attempt: its outcome, and what the model said until then."""

    result_id: UUID
    attempt: int
    outcome: Outcome
    output: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprobs: str | None = None
    model_version: int | None = None
    first_token_seconds: float | None = None
    failure: Failure | None = None
    retry_after_seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class Chunk:
    """Text of a running attempt, to be kept should its worker die. Offsets are code points."""

    result_id: UUID
    attempt: int
    offset: int
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None


def _failure_sql(failure: Failure) -> tuple[str, str, str]:
    quoted = failure.message.replace("'", "''")
    return f"'{failure.code}'", f"'{quoted}'", str(failure.retryable).lower()


def _by_verdict(column: int, otherwise: str) -> str:
    """A CASE that picks one column of the failure that the verdict stands for."""
    return f"""CASE j.verdict
      WHEN 'cancelled' THEN {_failure_sql(CANCELLED)[column]}
      WHEN 'expired' THEN {_failure_sql(DEADLINE_EXCEEDED)[column]}
      WHEN 'crashed' THEN {_failure_sql(ENGINE_CRASHED)[column]}
      WHEN 'worker_lost' THEN {_failure_sql(WORKER_LOST)[column]}
      WHEN 'completed' THEN NULL
      WHEN 'requeued' THEN NULL
      ELSE {otherwise} END"""


def _notify_ids(channel: str, condition: str = "true") -> str:
    """Tell a channel the ids of those rows of the statement that meet a condition, if any."""
    return f"""CASE WHEN count(*) FILTER (WHERE {condition}) > 0 THEN pg_notify('{channel}',
    string_agg(replace(id::text, '-', ''), ',') FILTER (WHERE {condition})) END"""


def _write_deliveries(ended: str) -> str:
    """A CTE that owes a delivery to each terminal row of `ended` that has a webhook."""
    return f"""deliveries AS (
  INSERT INTO webhook_deliveries (result_id, team_id, url)
  SELECT id, team_id, webhook_url FROM {ended}
  WHERE webhook_url IS NOT NULL AND state <> 'pending'
  -- No delivery may ever keep a result from its end.
  ON CONFLICT DO NOTHING RETURNING 1
)"""


_NOTIFY_DELIVERIES = (
    f"CASE WHEN EXISTS (SELECT FROM deliveries) THEN pg_notify('{WEBHOOKS}', '') END"
)


def _has_context(is_rendered: str) -> str:
    """Whether the context of a new result `i` exists, as plain text unless the prompt is rendered.

    It is locked: one that is being deleted is waited for, and then missing.
    """
    return f"""(i.has_new_context OR EXISTS (
      SELECT FROM contexts c WHERE c.id = i.context_id AND c.team_id = i.team_id
        AND ({is_rendered} OR c.content IS NOT NULL) FOR KEY SHARE))"""


def _enqueue_sql(keys: str, is_context_kept: str, is_result_kept: str) -> str:
    """The insertion of contexts and results, with what is to be done about keys before it."""
    return f"""
WITH {keys} context_input AS (
  SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[])
    AS i(id, team_id, content, messages, metadata)
), new_contexts AS (
  INSERT INTO contexts (id, team_id, content, messages, metadata)
  SELECT id, team_id, content, messages::jsonb, metadata::jsonb FROM context_input
  WHERE {is_context_kept}
  ON CONFLICT (id) DO NOTHING
), input AS (
  SELECT * FROM unnest($6::uuid[], $7::text[], $8::uuid[], $9::text[], $10::int[], $11::text[],
    $12::text[], $13::smallint[], $14::float8[], $15::text[], $16::uuid[], $17::uuid[],
    $18::text[], $19::bool[])
    AS i(id, team_id, context_id, model_name, model_version, prompt, parameters, priority,
         deadline_seconds, metadata, group_id, retry_of, webhook_url, has_new_context)
), inserted AS (
  INSERT INTO results (id, team_id, context_id, model_name, model_version, prompt, parameters,
                       priority, deadline_at, metadata, group_id, retry_of, webhook_url)
  SELECT i.id, i.team_id, i.context_id, i.model_name, i.model_version, i.prompt,
         i.parameters::jsonb, i.priority, now() + make_interval(secs => i.deadline_seconds),
         i.metadata::jsonb, i.group_id, i.retry_of, i.webhook_url
  FROM input i
  WHERE {_has_context("i.prompt IS NOT NULL")} AND {is_result_kept}
  ON CONFLICT (id) DO NOTHING
  RETURNING id, model_name
)
SELECT array_agg(id) AS ids,
       CASE WHEN count(*) > 0
            THEN pg_notify('{ENQUEUED}', left(string_agg(DISTINCT model_name, ','), 7000)) END
FROM inserted
"""


_ENQUEUE = _enqueue_sql("", "true", "true")
# A statement of its own: most batches have no key, and need not open the table and its indexes.
_ENQUEUE_WITH_KEYS = _enqueue_sql(
    take_keys_sql(20, _has_context("i.is_rendered")),
    "id NOT IN (SELECT context_id FROM refused)",
    "i.id NOT IN (SELECT id FROM refused)",
)

_ALREADY_ENQUEUED = "SELECT id FROM results WHERE id = ANY($1::uuid[])"

_CLAIM = f"""
WITH me AS (
  SELECT id FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE
), picked AS (
  SELECT p.id FROM me, unnest($2::text[], $3::int[]) AS w(model_name, free)
  CROSS JOIN LATERAL (
    SELECT r.id FROM results r
    WHERE r.kind = 'generation' AND r.model_name = w.model_name
      AND r.state = 'pending' AND r.worker_id IS NULL
      AND (r.not_before IS NULL OR r.not_before <= now())
    ORDER BY r.priority DESC, r.id
    LIMIT w.free FOR UPDATE SKIP LOCKED
  ) p
  WHERE NOT EXISTS (
    SELECT FROM results s WHERE s.model_name = w.model_name
      AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS})
)
UPDATE results r
SET worker_id = $1, attempt = r.attempt + 1, started_at = now(), not_before = NULL
FROM picked p, contexts c
WHERE r.id = p.id AND c.id = r.context_id
RETURNING r.id, r.attempt, r.model_name, coalesce(r.prompt, c.content) AS prompt, r.parameters,
          extract(epoch FROM r.deadline_at - now())::float8 AS seconds_left, r.engine_deaths
"""

# Run under a lock of the model's row, so that two workers cannot each find the model empty.
_CLAIM_SUSPECT = f"""
UPDATE results r
SET worker_id = $1, attempt = r.attempt + 1, started_at = now(), not_before = NULL
FROM contexts c
WHERE c.id = r.context_id AND r.id = (
  SELECT s.id FROM results s
  WHERE s.model_name = $2 AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS}
    AND s.worker_id IS NULL AND (s.not_before IS NULL OR s.not_before <= now())
  ORDER BY s.id LIMIT 1 FOR UPDATE)
AND NOT EXISTS (
  SELECT FROM results o
  WHERE o.state = 'pending' AND o.worker_id IS NOT NULL AND o.model_name = $2)
AND EXISTS (SELECT FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE)
RETURNING r.id, r.attempt, r.model_name, coalesce(r.prompt, c.content) AS prompt, r.parameters,
          extract(epoch FROM r.deadline_at - now())::float8 AS seconds_left, r.engine_deaths
"""

_SUSPECT_MODELS = f"""
SELECT DISTINCT model_name FROM results
WHERE state = 'pending' AND engine_deaths >= {SUSPECT_DEATHS} AND worker_id IS NULL
  AND model_name = ANY($1::text[])
"""

_APPEND = f"""
WITH kept AS (
  INSERT INTO result_chunks (result_id, attempt, "offset", text, prompt_tokens, completion_tokens)
  SELECT i.result_id, i.attempt, i."offset", i.text, i.prompt_tokens, i.completion_tokens
  FROM (
    SELECT u.* FROM unnest($2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::int[], $7::int[])
      AS u(result_id, attempt, "offset", text, prompt_tokens, completion_tokens)
    JOIN results r ON r.id = u.result_id
    WHERE r.worker_id = $1 AND r.attempt = u.attempt AND r.state = 'pending'
    ORDER BY r.id FOR SHARE OF r
  ) i
  ON CONFLICT DO NOTHING
)
SELECT pg_notify('{APPENDED}', ids) FROM unnest($8::text[]) AS told(ids)
"""

# Writes the verdict `j` on the rows `r`: the one place where a result leaves its attempt.
_CONCLUDE = f"""
  UPDATE results r SET
    state = CASE WHEN j.verdict = 'requeued' THEN 'pending'
                 WHEN j.verdict = 'completed' THEN 'completed' ELSE 'failed' END,
    worker_id = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE r.worker_id END,
    started_at = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE r.started_at END,
    first_token_at = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE
      r.started_at + make_interval(secs => j.first_token_seconds) END,
    finished_at = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE clock_timestamp() END,
    not_before = CASE WHEN j.verdict = 'requeued'
      THEN now() + make_interval(secs => j.retry_after_seconds) END,
    lost_attempts = r.lost_attempts + j.lost::int,
    engine_deaths = r.engine_deaths + j.engine_died::int,
    attempt_history = CASE
      WHEN j.error_code IS NULL OR jsonb_array_length(r.attempt_history) >= {_HISTORY_LIMIT}
      THEN r.attempt_history
      ELSE r.attempt_history || jsonb_build_object('attempt', r.attempt, 'worker_id', r.worker_id,
        'started_at', r.started_at, 'ended_at', clock_timestamp(), 'counted', j.lost,
        'error', jsonb_build_object('code', j.error_code, 'message', j.error_message)) END,
    model_version = coalesce(j.model_version, r.model_version),
    output = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.output END,
    finish_reason = CASE WHEN j.verdict = 'requeued' THEN NULL
                         WHEN j.verdict = 'completed' THEN j.finish_reason
                         WHEN j.verdict = 'cancelled' THEN 'cancelled' ELSE 'error' END,
    prompt_tokens = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.prompt_tokens END,
    completion_tokens = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.completion_tokens END,
    logprobs = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.logprobs::jsonb END,
    error_code = {_by_verdict(0, "j.error_code")},
    error_message = {_by_verdict(1, "j.error_message")},
    error_retryable = {_by_verdict(2, "j.error_retryable")}
  FROM judged j WHERE r.id = j.id
  RETURNING r.id, r.state, r.team_id, r.webhook_url
"""

_END_ATTEMPTS = f"""
WITH input AS (
  SELECT * FROM unnest($2::uuid[], $3::int[], $4::text[], $5::text[], $6::text[], $7::int[],
    $8::int[], $9::text[], $10::int[], $11::float8[], $12::text[], $13::text[], $14::bool[],
    $15::float8[])
    AS i(result_id, attempt, outcome, output, finish_reason, prompt_tokens, completion_tokens,
         logprobs, model_version, first_token_seconds, error_code, error_message, error_retryable,
         retry_after_seconds)
), judged AS (
  SELECT r.id, i.*, i.outcome = 'lost' AS lost, i.outcome = 'lost' AS engine_died,
    CASE
      WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
      WHEN i.outcome IN ('completed', 'failed') THEN i.outcome
      WHEN r.deadline_at <= now() THEN 'expired'
      WHEN i.outcome = 'lost' AND r.lost_attempts + 1 >= $16::int THEN
        CASE WHEN r.engine_deaths >= {SUSPECT_DEATHS} THEN 'crashed' ELSE 'failed' END
      ELSE 'requeued' END AS verdict
  FROM input i JOIN results r ON r.id = i.result_id
  WHERE r.worker_id = $1 AND r.attempt = i.attempt AND r.state = 'pending'
  ORDER BY r.id FOR UPDATE OF r
), ended AS ({_CONCLUDE}), swept AS (
  DELETE FROM result_chunks c USING ended e WHERE c.result_id = e.id
), {_write_deliveries("ended")}
SELECT array_agg(id) AS ids, {_notify_ids(ENDED, "state <> 'pending'")}, {_NOTIFY_DELIVERIES}
FROM ended
"""

_ALREADY_ENDED = """
SELECT r.id FROM results r
JOIN unnest($2::uuid[], $3::int[]) AS i(id, attempt) ON r.id = i.id
WHERE r.attempt = i.attempt AND (r.worker_id = $1 AND r.state <> 'pending' OR r.worker_id IS NULL)
"""

_LOST_WORKERS = """
SELECT id FROM workers
WHERE dead_at IS NULL AND lease_expires_at < now()
  AND pg_postmaster_start_time() + make_interval(secs => $1) < now()
ORDER BY id LIMIT 10 FOR UPDATE SKIP LOCKED
"""

# The rows of dead workers ($1), whose text survives in the chunks. $2: whether the attempts count.
_RELEASE = f"""
WITH picked AS MATERIALIZED (
  -- In no order: ordered by id, the planner walks all results in the hope of a common owner.
  SELECT id FROM results
  WHERE worker_id = ANY($1::uuid[]) AND state = 'pending' LIMIT {MAX_BATCH}
), judged AS (
  SELECT r.id, r.attempt, $2::bool AS lost, false AS engine_died,
    CASE
      WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
      WHEN r.deadline_at <= now() THEN 'expired'
      WHEN $2::bool AND r.lost_attempts + 1 >= $3::int THEN 'worker_lost'
      ELSE 'requeued' END AS verdict,
    coalesce((SELECT string_agg(c.text, '' ORDER BY c."offset") FROM result_chunks c
              WHERE c.result_id = r.id AND c.attempt = r.attempt), '') AS output,
    (SELECT max(c.prompt_tokens) FROM result_chunks c
     WHERE c.result_id = r.id AND c.attempt = r.attempt) AS prompt_tokens,
    (SELECT max(c.completion_tokens) FROM result_chunks c
     WHERE c.result_id = r.id AND c.attempt = r.attempt) AS completion_tokens,
    NULL::text AS finish_reason, NULL::text AS logprobs, NULL::int AS model_version,
    NULL::float8 AS first_token_seconds, 0::float8 AS retry_after_seconds,
    CASE WHEN $2::bool THEN {_failure_sql(WORKER_LOST)[0]} END AS error_code,
    'The worker stopped renewing its lease.' AS error_message, true AS error_retryable
  FROM picked p JOIN results r ON r.id = p.id
  WHERE r.worker_id = ANY($1::uuid[]) AND r.state = 'pending'
  ORDER BY r.id FOR UPDATE OF r
), ended AS ({_CONCLUDE}), swept AS (
  DELETE FROM result_chunks c USING ended e WHERE c.result_id = e.id
), {_write_deliveries("ended")}
SELECT count(*) AS released, CASE WHEN count(*) > 0 THEN pg_notify('{ENQUEUED}', '') END,
  {_notify_ids(ENDED, "state <> 'pending'")}, {_NOTIFY_DELIVERIES}
FROM ended
"""

# Unclaimed rows end at once; running ones are marked, and their owner is told.
_CANCEL = f"""
WITH picked AS (
  SELECT id, worker_id FROM results WHERE {{where}} AND state = 'pending'
  ORDER BY id LIMIT {MAX_BATCH} FOR UPDATE
), cancelled AS (
  UPDATE results r SET
    cancel_requested_at = coalesce(r.cancel_requested_at, now()),
    state = CASE WHEN p.worker_id IS NULL THEN 'failed' ELSE 'pending' END,
    finished_at = CASE WHEN p.worker_id IS NULL THEN now() END,
    finish_reason = CASE WHEN p.worker_id IS NULL THEN 'cancelled' END,
    error_code = CASE WHEN p.worker_id IS NULL THEN {_failure_sql(CANCELLED)[0]} END,
    error_message = CASE WHEN p.worker_id IS NULL THEN {_failure_sql(CANCELLED)[1]} END,
    error_retryable = CASE WHEN p.worker_id IS NULL THEN {_failure_sql(CANCELLED)[2]} END
  FROM picked p WHERE r.id = p.id
  RETURNING r.id, r.state, r.team_id, r.webhook_url
), {_write_deliveries("cancelled")}
SELECT count(*) AS cancelled, {_notify_ids(ENDED, "state = 'failed'")},
  {_notify_ids(CANCELLED_CHANNEL, "state = 'pending'")}, {_NOTIFY_DELIVERIES}
FROM cancelled
"""

_EXPIRE = f"""
WITH ended AS (
  UPDATE results r SET state = 'failed', finished_at = now(), finish_reason = 'error',
    error_code = {_failure_sql(DEADLINE_EXCEEDED)[0]},
    error_message = {_failure_sql(DEADLINE_EXCEEDED)[1]},
    error_retryable = {_failure_sql(DEADLINE_EXCEEDED)[2]}
  WHERE r.id IN (
    SELECT id FROM results WHERE state = 'pending' AND worker_id IS NULL AND deadline_at <= now()
    ORDER BY deadline_at LIMIT {MAX_BATCH} FOR UPDATE SKIP LOCKED)
  RETURNING r.id, r.state, r.team_id, r.webhook_url
), {_write_deliveries("ended")}
SELECT count(*) AS ended, {_notify_ids(ENDED)}, {_NOTIFY_DELIVERIES} FROM ended
"""

_TELL_STOPPED = f"""
SELECT {_notify_ids(CANCELLED_CHANNEL)}, {_notify_ids(ENDED)} FROM unnest($1::uuid[]) AS i(id)
"""

_STILL_OURS = """
SELECT id, attempt, cancel_requested_at IS NOT NULL AS is_cancelled FROM results
WHERE worker_id = $1 AND state = 'pending'
"""


class JobQueue:
    """Enqueue, claim, append, end, cancel, rescue, expire: every transition of a result."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._enqueues: Lane[NewResult, bool] = Lane(
            database,
            _enqueue,
            max_items=_MAX_ENQUEUE,
            retry_seconds=settings.database_timeout_seconds,
        )

    async def enqueue(self, results: Sequence[NewResult]) -> list[bool]:
        """Commit new results in one statement; False where the context does not exist, or the
        idempotency key is another result's.

        Returns only after the commit: an id may be told from then on.
        """
        return list(await self._enqueues.submit_all(results))

    async def claim(self, worker_id: UUID, free: Mapping[str, int]) -> list[Claim]:
        """Claim up to `free[model]` results of each model; none once the worker is marked dead.

        Not sent again after a lost connection: rows of a claim whose answer was lost show up in
        `owned` and are handed back by the heartbeat.
        """
        async with self._database.connection() as connection:
            rows = await connection.fetch(_CLAIM, worker_id, list(free), list(free.values()))
        return [_to_claim(row) for row in rows]

    async def claim_suspects(self, worker_id: UUID, models: Sequence[str]) -> list[Claim]:
        """Claim, for each model on which nothing runs, one result that must run alone."""
        claims = []
        for row in await self._database.fetch(_SUSPECT_MODELS, list(models)):
            model = row["model_name"]
            async with self._database.connection() as connection, connection.transaction():
                await connection.execute("SELECT FROM models WHERE name = $1 FOR UPDATE", model)
                claimed = await connection.fetch(_CLAIM_SUSPECT, worker_id, model)
            claims += [_to_claim(row) for row in claimed]
        return claims

    async def append(
        self, worker_id: UUID, chunks: Sequence[Chunk], watched: Sequence[UUID] = ()
    ) -> None:
        """Keep text of running attempts, and tell who reads the `watched` results elsewhere.

        Chunks of attempts no longer ours are dropped.
        """
        await self._database.run(
            lambda connection: connection.execute(
                _APPEND,
                worker_id,
                [chunk.result_id for chunk in chunks],
                [chunk.attempt for chunk in chunks],
                [chunk.offset for chunk in chunks],
                [chunk.text for chunk in chunks],
                [chunk.prompt_tokens for chunk in chunks],
                [chunk.completion_tokens for chunk in chunks],
                list(join_ids(watched)),
            )
        )

    def ending_lane(self, worker_id: UUID, retry_seconds: float) -> Lane[AttemptEnd, bool]:
        """The lane on which one worker ends its attempts; False: the attempt was not ours."""

        async def end_attempts(
            connection: Connection, ends: Sequence[AttemptEnd], resent: bool
        ) -> list[bool]:
            return await _end_attempts(
                connection, worker_id, ends, resent, self._settings.max_attempts
            )

        return Lane(self._database, end_attempts, max_items=MAX_BATCH, retry_seconds=retry_seconds)

    async def owned(self, connection: Connection, worker_id: UUID) -> dict[UUID, tuple[int, bool]]:
        """Pending results of a worker: id -> (attempt, whether cancellation was requested).

        Asked on the heartbeat's own connection: no retry may hold up the next renewal.
        """
        rows = await connection.fetch(_STILL_OURS, worker_id)
        return {row["id"]: (row["attempt"], row["is_cancelled"]) for row in rows}

    async def cancel(self, team_id: str, **filters: object) -> int:
        """Cancel a team's pending results by `id`, `context_id` or `model_name`; how many.

        Queued ones are terminal on return; running ones are marked and their worker is told.
        """
        names = ["team_id", *filters]
        where = " AND ".join(f"{name} = ${place}" for place, name in enumerate(names, 1))
        # A second pass finds only rows not yet marked; one `id` needs no pass.
        where += "" if "id" in filters else " AND cancel_requested_at IS NULL"
        statement = _CANCEL.format(where=where)
        total: int = 0
        while True:
            row = await self._database.fetchrow(statement, team_id, *filters.values())
            assert row is not None
            total += row["cancelled"]
            if row["cancelled"] < MAX_BATCH:
                return total

    async def tell_stopped(self, ids: Sequence[UUID]) -> None:
        """Tell workers and waiters that results of these ids are gone."""
        for start in range(0, len(ids), MAX_BATCH):
            await self._database.fetch(_TELL_STOPPED, list(ids[start : start + MAX_BATCH]))

    async def rescue(self, lease_seconds: float) -> int:
        """Mark workers dead whose lease ran out, and free their results; how many results.

        Judges nothing while the server is younger than a lease. The caller must itself have been
        connected for one (see `maintenance`).
        """

        async def work(connection: Connection) -> list[UUID]:
            async with connection.transaction():
                lost = [row["id"] for row in await connection.fetch(_LOST_WORKERS, lease_seconds)]
                if lost:
                    await connection.execute(
                        "UPDATE workers SET dead_at = now() WHERE id = ANY($1::uuid[])", lost
                    )
            return lost

        await self._database.run(work)
        # Also those of workers marked dead by a rescuer that died before it freed them.
        return await self.release(await self._dead_owners(), counted=True)

    async def retire(self, worker_id: UUID) -> int:
        """End a worker's own id and hand its results back; they do not count as attempts."""
        await self._database.fetch(
            "UPDATE workers SET dead_at = coalesce(dead_at, now()) WHERE id = $1", worker_id
        )
        return await self.release([worker_id], counted=False)

    async def release(self, worker_ids: Sequence[UUID], *, counted: bool) -> int:
        """Free the results of dead workers, or end those that have no attempt or time left."""
        released: int = 0
        while worker_ids:
            row = await self._database.fetchrow(
                _RELEASE, list(worker_ids), counted, self._settings.max_attempts
            )
            assert row is not None
            released += row["released"]
            if row["released"] < MAX_BATCH:
                break
        return released

    async def expire(self) -> int:
        """Fail queued results past their deadline; how many."""
        expired: int = 0
        while True:
            row = await self._database.fetchrow(_EXPIRE)
            assert row is not None
            expired += row["ended"]
            if row["ended"] < MAX_BATCH:
                return expired

    async def _dead_owners(self) -> list[UUID]:
        rows = await self._database.fetch(
            """SELECT w.id FROM workers w
               WHERE w.dead_at > now() - interval '1 day' AND EXISTS (
                 SELECT FROM results r WHERE r.worker_id = w.id AND r.state = 'pending')"""
        )
        return [row["id"] for row in rows]


async def _enqueue(
    connection: Connection, results: Sequence[NewResult], resent: bool
) -> list[bool]:
    contexts = [result.new_context for result in results if result.new_context is not None]
    keyed = [(result.key, result) for result in results if result.key is not None]
    arguments: list[Sequence[object]] = [
        [context.id for context in contexts],
        [context.team_id for context in contexts],
        [context.content for context in contexts],
        [context.messages for context in contexts],
        [context.metadata for context in contexts],
        [result.id for result in results],
        [result.team_id for result in results],
        [result.context_id for result in results],
        [result.model_name for result in results],
        [result.model_version for result in results],
        [result.prompt for result in results],
        [result.parameters for result in results],
        [result.priority for result in results],
        [result.deadline_seconds for result in results],
        [result.metadata for result in results],
        [result.group_id for result in results],
        [result.retry_of for result in results],
        [result.webhook_url for result in results],
        [result.new_context is not None for result in results],
    ]
    if keyed:
        arguments += [
            [result.id for _, result in keyed],
            [result.team_id for _, result in keyed],
            [result.context_id for _, result in keyed],
            [result.new_context is not None for _, result in keyed],
            [result.prompt is not None for _, result in keyed],
            [key.key for key, _ in keyed],
            [key.request_hash for key, _ in keyed],
            [key.seconds for key, _ in keyed],
        ]
    row = await connection.fetchrow(_ENQUEUE_WITH_KEYS if keyed else _ENQUEUE, *arguments)
    stored = set(row["ids"] or ()) if row else set()
    if resent and len(stored) < len(results):
        # The first sending may have been committed although its answer was lost.
        ids = [result.id for result in results]
        stored |= {row["id"] for row in await connection.fetch(_ALREADY_ENQUEUED, ids)}
    return [result.id in stored for result in results]


async def _end_attempts(
    connection: Connection,
    worker_id: UUID,
    ends: Sequence[AttemptEnd],
    resent: bool,
    max_attempts: int,
) -> list[bool]:
    failures = [end.failure for end in ends]
    row = await connection.fetchrow(
        _END_ATTEMPTS,
        worker_id,
        [end.result_id for end in ends],
        [end.attempt for end in ends],
        [end.outcome for end in ends],
        [end.output for end in ends],
        [end.finish_reason for end in ends],
        [end.prompt_tokens for end in ends],
        [end.completion_tokens for end in ends],
        [end.logprobs for end in ends],
        [end.model_version for end in ends],
        [end.first_token_seconds for end in ends],
        [failure.code if failure else None for failure in failures],
        [failure.message if failure else None for failure in failures],
        [failure.retryable if failure else None for failure in failures],
        [end.retry_after_seconds for end in ends],
        max_attempts,
    )
    ours = set(row["ids"] or ()) if row else set()
    if resent and len(ours) < len(ends):
        again = await connection.fetch(
            _ALREADY_ENDED,
            worker_id,
            [end.result_id for end in ends],
            [end.attempt for end in ends],
        )
        ours |= {row["id"] for row in again}
    return [end.result_id in ours for end in ends]


def _to_claim(row: Any) -> Claim:
    return Claim(
        id=row["id"],
        attempt=row["attempt"],
        model_name=row["model_name"],
        prompt=row["prompt"],
        parameters=orjson.loads(row["parameters"]),
        seconds_left=row["seconds_left"],
        is_suspect=row["engine_deaths"] >= SUSPECT_DEATHS,
    )
