"""Creation of batches: once under an idempotency key, and within the bound of open batches.

Both hold for all processes: batches of one team are created one after another.
"""

from dataclasses import dataclass
from uuid import UUID

import asyncpg

from app.core.database import Connection, lock_team
from app.core.errors import IdempotencyConflictError, LimitError
from app.core.listener import BATCHES
from app.queue.idempotency import NewKey

ACTIVE = "state IN ('validating', 'in_progress', 'cancelling', 'finalizing')"
_RETRY_SECONDS = 10

# The key of a batch expires; the batch stays.
_FREE_KEY = """
UPDATE batches SET idempotency_key = NULL, request_hash = NULL, key_expires_at = NULL
WHERE team_id = $1 AND idempotency_key = $2 AND key_expires_at <= now()
"""
BY_KEY = """
SELECT id, request_hash FROM batches
WHERE team_id = $1 AND idempotency_key = $2 AND key_expires_at > now()
"""
_COUNT = f"""
SELECT count(*) FROM (
  SELECT FROM batches WHERE team_id = $1 AND {ACTIVE} AND id <> $2 LIMIT $3) open
"""
_CREATE = f"""
WITH created AS (
  INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, metadata,
                       output_seconds, expires_at, idempotency_key, request_hash, key_expires_at)
  SELECT $1, $2, $3, $4, $5, $6::jsonb, $7, now() + make_interval(secs => $8), $9, $10,
    now() + make_interval(secs => $11)
  ON CONFLICT (id) DO NOTHING RETURNING id
)
SELECT pg_notify('{BATCHES}', '') FROM created
"""


@dataclass(slots=True, frozen=True)
class NewBatch:
    """A requested batch, whose input file exists."""

    id: UUID
    team_id: str
    endpoint: str
    input_file_id: UUID
    completion_window: str
    metadata: str  # JSON text
    window_seconds: float
    output_seconds: int | None  # lifetime of its output files; None: no limit
    key: NewKey | None = None


async def create_batch(connection: Connection, new: NewBatch, max_open: int) -> UUID:
    """Commit a new batch and notify the processors; its id, or that of the first one under its key.

    Raises IdempotencyConflictError; LimitError, where a bound is set (0: none). Idempotent.
    """
    async with connection.transaction():
        await lock_team(connection, "batches", new.team_id)
        if new.key is not None:
            await connection.execute(_FREE_KEY, new.team_id, new.key.key)
            taken = await connection.fetchrow(BY_KEY, new.team_id, new.key.key)
            if taken is not None:
                return same_request(taken, new.key)
        if max_open:
            count = await connection.fetchval(_COUNT, new.team_id, new.id, max_open)
            if count >= max_open:
                raise _too_many(max_open)
        await connection.execute(
            _CREATE,
            new.id,
            new.team_id,
            new.endpoint,
            new.input_file_id,
            new.completion_window,
            new.metadata,
            new.output_seconds,
            new.window_seconds,
            new.key and new.key.key,
            new.key and new.key.request_hash,
            new.key and new.key.seconds,
        )
    return new.id


def same_request(taken: asyncpg.Record, key: NewKey) -> UUID:
    """The batch that has the key. Raises IdempotencyConflictError if another request made it."""
    identifier: UUID = taken["id"]
    if taken["request_hash"] != key.request_hash:
        raise IdempotencyConflictError(
            f"Batch batch_{identifier} was made under this idempotency key, by another request. "
            "Repeat that one unchanged, or take a new key.",
            extra={"batch_id": f"batch_{identifier}"},
        )
    return identifier


def _too_many(allowed: int) -> LimitError:
    return LimitError(
        f"{allowed} batches of your team have not ended, as many as may be open "
        "(LLM_TEAM_MAX_BATCHES). Try again when one has ended, or cancel one.",
        headers={"Retry-After": str(_RETRY_SECONDS)},
        extra={"limit": "max_batches", "allowed": allowed, "position": None},
    )
