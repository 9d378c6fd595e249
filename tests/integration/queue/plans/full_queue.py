"""A large queue beside many ended results, and the states that statistics of it may be in."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from app.core.ids import new_id

TEAMS = ("default", "red", "blue")
MODELS = ("m-0", "m-1", "m-2")
RARE, SUSPECTED = "rare", "suspected"  # every thousandth result waits for it; has all suspects
RUNNING = 300  # of the living worker, and as many of the dead one
CHUNKS = 10  # of each of them
EXPIRED = 50
TABLES = (
    "results", "contexts", "result_chunks", "webhook_deliveries", "idempotency_keys", "workers",
    "undigested_results", "result_search", "batches", "batch_lines", "team_limits", "jobs",
    "job_progress", "job_rows", "job_events", "result_tags",
)  # fmt: skip

WITHOUT_AUTOVACUUM = ";".join(
    f"ALTER TABLE {name} SET (autovacuum_enabled = off)" for name in TABLES
)
# The place `n` of a row gives its team, model and context.
_TEAM = f"(ARRAY{list(TEAMS)})[1 + n % 3]"
_CONTEXT = f"md5({_TEAM} || n / 3 % 1000)::uuid"
_MODEL = f"CASE n % 1000 WHEN 0 THEN '{RARE}' ELSE (ARRAY{list(MODELS)})[1 + n / 3 % 3] END"
_COLUMNS = "id, team_id, context_id, model_name, parameters, deadline_at, deadline_seconds"
_REQUEST = f"{_TEAM}, {_CONTEXT}, {_MODEL}, '{{\"max_tokens\": 16}}', now() + interval '1 h', 3600"

_CONTEXTS = f"""
INSERT INTO contexts (id, team_id, content)
SELECT DISTINCT {_CONTEXT}, {_TEAM}, 'a prompt' FROM generate_series(1, 3000) n
ON CONFLICT DO NOTHING
"""
_ENDED = f"""
INSERT INTO results ({_COLUMNS}, state, worker_id, attempt, started_at, finished_at, output,
  finish_reason, error_code, error_message, error_retryable, metadata)
SELECT uuidv7(interval '-1 day' + make_interval(secs => n / 1000.0)), {_REQUEST},
  CASE WHEN n % 20 = 0 THEN 'failed' ELSE 'completed' END, $1::uuid, 1, now() - interval '20 h',
  now() - interval '20 h' + make_interval(secs => n / 1000.0), 'some text', 'stop',
  CASE WHEN n % 20 = 0 THEN 'model_error' END, CASE WHEN n % 20 = 0 THEN 'It failed.' END,
  CASE WHEN n % 20 = 0 THEN false END, CASE WHEN n % 10 = 0 THEN '{{"run": "busy"}}'
    WHEN n % 999 = 0 THEN '{{"run": "rare"}}' ELSE '{{}}' END::jsonb
FROM generate_series(1, $2::int) n
"""
_WAITING = f"""
INSERT INTO results ({_COLUMNS}, priority, fair_key)
SELECT uuidv7(make_interval(secs => n / 1000.0 - 3600)), {_REQUEST}, (n % 100 = 0)::int, n / 9
FROM generate_series(1, $1::int) n
"""
_RUNNING = f"""
INSERT INTO results ({_COLUMNS}, worker_id, attempt, started_at, resumable)
SELECT uuidv7(), {_REQUEST}, $1::uuid, 1, now(), true FROM generate_series(1, {RUNNING}) n
"""
_OTHERS_OF_ENDED = """
INSERT INTO result_tags (team_id, tag, result_id)
SELECT r.team_id, tag, r.id FROM results r CROSS JOIN LATERAL tags_of_metadata(r.metadata) AS tag
WHERE r.metadata <> '{}' ON CONFLICT DO NOTHING;
INSERT INTO result_search (result_id, team_id) SELECT id, team_id FROM results ORDER BY id;
INSERT INTO webhook_deliveries (result_id, team_id, url, state, finished_at)
SELECT id, team_id, 'http://hook.example/', 'delivered', now() FROM results ORDER BY id DESC LIMIT 10000;
INSERT INTO idempotency_keys (team_id, key, request_hash, result_id, expires_at)
SELECT team_id, 'key ' || id, 'hash', id, now() + interval '1 h' FROM results ORDER BY id DESC LIMIT 10000;
INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state, ended_at, expires_at)
SELECT uuidv7(), 'default', '/v1/completions', uuidv7(), '24h', 'completed', now(), now() + interval '1 day'
FROM generate_series(1, 2000);
INSERT INTO batch_lines (batch_id, line, custom_id, state, outcome, is_completed)
SELECT id, n, n, 'done', '{}', true FROM (SELECT id FROM batches LIMIT 100), generate_series(1, 100) n
"""
_OTHERS_OF_WAITING = f"""
UPDATE retention_state SET cleaned_at = now();
UPDATE results SET deadline_at = now() - interval '1 s' WHERE id IN (
  SELECT id FROM results WHERE state = 'pending' AND worker_id IS NULL ORDER BY id DESC LIMIT {EXPIRED});
INSERT INTO result_chunks (result_id, attempt, "offset", text, completion_tokens)
SELECT id, 1, n * 5, 'words', n FROM results, generate_series(0, {CHUNKS - 1}) n
WHERE state = 'pending' AND worker_id IS NOT NULL;
UPDATE webhook_deliveries SET state = 'pending', finished_at = NULL WHERE result_id IN (
  SELECT result_id FROM webhook_deliveries ORDER BY result_id LIMIT 50);
INSERT INTO undigested_results (result_id)
SELECT result_id FROM result_search ORDER BY result_id DESC LIMIT 1000;
DELETE FROM result_search WHERE result_id IN (SELECT result_id FROM undigested_results);
INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state, expires_at)
SELECT uuidv7(), 'default', '/v1/completions', uuidv7(), '24h', 'in_progress', now() + interval '1 day'
FROM generate_series(1, 5)
"""
# An open job of the first team, and a cancelled one of the second.
_JOBS = """
INSERT INTO jobs (id, team_id, priority, max_rows, closed_at, cancel_requested_at)
SELECT md5(team)::uuid, team, 0, 1000000, CASE team WHEN 'red' THEN now() END,
  CASE team WHEN 'red' THEN now() END
FROM unnest(ARRAY['default', 'red']) team ON CONFLICT DO NOTHING;
INSERT INTO job_progress (job_id) SELECT id FROM jobs ON CONFLICT DO NOTHING;
INSERT INTO job_rows (job_id, key, request_hash, result_id, place, ended_as)
SELECT md5(team_id)::uuid, 'key ' || id, 'hash', id, CASE WHEN state <> 'pending' THEN
    row_number() OVER (PARTITION BY team_id ORDER BY state, id) END,
  CASE WHEN state <> 'pending' THEN coalesce(error_code, 'completed') END
FROM results WHERE team_id <> 'blue' ON CONFLICT DO NOTHING;
INSERT INTO job_events (job_id, result_id, ended_as, rows)
SELECT job_id, result_id, 'completed', 1 FROM job_rows WHERE place IS NULL
ORDER BY job_id, result_id LIMIT 1000
"""
_SUSPECTS = f"""
INSERT INTO results ({_COLUMNS}, engine_deaths)
SELECT uuidv7(), 'default', md5('default0')::uuid, '{SUSPECTED}', '{{}}', now() + interval '1 h', 3600, 2
FROM generate_series(1, 3)
"""
_WORKER = """
INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)
VALUES ($1, 'h', 1, now() + interval '1 h', CASE WHEN $2 THEN now() END)
"""


@dataclass(slots=True, frozen=True)
class Ids:
    """The rows that the statements name."""

    worker: UUID
    dead_worker: UUID
    context: UUID
    ended: Sequence[UUID]  # of the default team, the oldest first
    running: Sequence[UUID]
    waiting: Sequence[UUID]  # of the default team
    job: UUID  # of the default team


async def fill_ended(connection: asyncpg.Connection, count: int) -> None:
    # Foreign keys are not checked: the rows are there.
    await connection.execute("SET session_replication_role = replica")
    await connection.execute(_CONTEXTS)
    await connection.execute(_ENDED, new_id(), count)
    await connection.execute(_OTHERS_OF_ENDED)
    await connection.execute(_JOBS)


async def fill_waiting(connection: asyncpg.Connection, count: int) -> None:
    await connection.execute("SET session_replication_role = replica")
    await connection.execute(_CONTEXTS)
    for is_dead in (False, True):
        worker = new_id()
        await connection.execute(_WORKER, worker, is_dead)
        await connection.execute(_RUNNING, worker)
    await connection.execute(_WAITING, count)
    await connection.execute(_SUSPECTS)
    await connection.execute(_OTHERS_OF_WAITING)
    await connection.execute(_JOBS)


async def find_ids(connection: asyncpg.Connection) -> Ids:
    async def ids(condition: str) -> list[UUID]:
        query = f"SELECT id FROM {condition} ORDER BY id LIMIT 1000"
        return [row["id"] for row in await connection.fetch(query)]

    (worker,) = await ids("workers WHERE dead_at IS NULL") or [new_id()]
    (dead_worker,) = await ids("workers WHERE dead_at IS NOT NULL") or [new_id()]
    contexts = await ids("contexts WHERE team_id = 'default'") or [new_id()]
    return Ids(
        worker,
        dead_worker,
        contexts[0],
        await ids("results WHERE team_id = 'default' AND state <> 'pending'"),
        await ids(f"results WHERE state = 'pending' AND worker_id = '{worker}'"),
        await ids("results WHERE team_id = 'default' AND state = 'pending' AND worker_id IS NULL"),
        *(await ids("jobs WHERE team_id = 'default'") or [new_id()]),
    )
