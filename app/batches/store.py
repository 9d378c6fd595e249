"""Batches as their teams see them: create, read, list and cancel.

Creation is once under an idempotency key, and within the bound of open batches. Both hold for all
processes: batches of one team are created one after another.
"""

from collections.abc import Sequence
from uuid import UUID

import asyncpg

from app.batches.rows import ACTIVE, COLUMNS, MESSAGES, Batch, NewBatch
from app.core.database import Connection, Database, lock_team
from app.core.errors import ConflictError, IdempotencyConflictError, LimitError, NotFoundError
from app.core.ids import HIGHEST_ID, LOWEST_ID
from app.core.listener import BATCHES
from app.queue.idempotency import NewKey

_RETRY_SECONDS = 10

# The key of a batch expires; the batch stays.
_FREE_KEY = """
UPDATE batches SET idempotency_key = NULL, request_hash = NULL, key_expires_at = NULL
WHERE team_id = $1 AND idempotency_key = $2 AND key_expires_at <= now()
"""
_BY_KEY = """
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
                       output_seconds, expires_at, idempotency_key, request_hash, key_expires_at,
                       token_id)
  SELECT $1, $2, $3, $4, $5, $6::jsonb, $7, now() + make_interval(secs => $8), $9, $10,
    now() + make_interval(secs => $11), $12
  ON CONFLICT (id) DO NOTHING RETURNING id
)
SELECT pg_notify('{BATCHES}', '') FROM created
"""
_GET = f"SELECT {COLUMNS} FROM batches WHERE id = $1 AND team_id = $2"
# Rows, not equalities: only an index that begins with the team has this order.
_LIST = f"""
SELECT {COLUMNS} FROM batches
WHERE (team_id, id) > ($1, $2) AND (team_id, id) < ($1, $3) AND (endpoint = '{MESSAGES}') = $5
ORDER BY team_id {{order}}, id {{order}} LIMIT $4
"""
_LISTS = {order: _LIST.format(order=order) for order in ("ASC", "DESC")}
_DELETE = """
DELETE FROM batches WHERE id = $1 AND team_id = $2 AND ended_at IS NOT NULL RETURNING id
"""
_CANCEL = f"""
WITH marked AS (
  UPDATE batches SET state = 'cancelling', cancelling_at = now()
  WHERE id = $1 AND team_id = $2 AND state IN ('validating', 'in_progress')
  RETURNING id
)
SELECT pg_notify('{BATCHES}', id::text) FROM marked
"""


class BatchStore:
    """Batches of one team at a time; another team's do not exist: NotFoundError."""

    def __init__(self, database: Database, max_open: int = 0) -> None:
        """`max_open`: batches of a team that have not ended; 0 is no bound."""
        self._database = database
        self._max_open = max_open

    async def create(self, new: NewBatch) -> tuple[Batch, bool]:
        """Create it, or find it by its key (False). Raises IdempotencyConflictError, LimitError."""
        identifier = await self._database.run(
            lambda connection: _create(connection, new, self._max_open)
        )
        return await self.get(new.team_id, identifier), identifier == new.id

    async def find(self, team_id: str, key: NewKey) -> Batch | None:
        taken = await self._database.fetchrow(_BY_KEY, team_id, key.key)
        return None if taken is None else await self.get(team_id, _same_request(taken, key))

    async def get(self, team_id: str, batch_id: UUID) -> Batch:
        row = await self._database.fetchrow(_GET, batch_id, team_id)
        if row is None:
            raise NotFoundError(f"There is no batch {batch_id}.")
        return Batch(**row)

    async def list(
        self,
        team_id: str,
        after: UUID | None,
        limit: int,
        *,
        before: UUID | None = None,
        is_of_messages: bool = False,
    ) -> Sequence[Batch]:
        """Newest first: those behind the id `after`, or the last ones ahead of `before`."""
        statement = _LISTS["DESC" if before is None else "ASC"]
        rows = await self._database.fetch(
            statement, team_id, before or LOWEST_ID, after or HIGHEST_ID, limit, is_of_messages
        )
        batches = [Batch(**row) for row in rows]
        return batches if before is None else batches[::-1]

    async def delete(self, team_id: str, batch_id: UUID) -> None:
        """Forget a batch that has ended. Raises ConflictError, NotFoundError."""
        if await self._database.fetchrow(_DELETE, batch_id, team_id) is None:
            batch = await self.get(team_id, batch_id)
            raise ConflictError(
                f"A batch that is {batch.state} cannot be deleted; cancel it first."
            )

    async def cancel(self, team_id: str, batch_id: UUID) -> Batch:
        """Stop a batch; one that is stopped already stays so. Raises ConflictError, NotFoundError."""
        await self._database.fetch(_CANCEL, batch_id, team_id)
        batch = await self.get(team_id, batch_id)
        if batch.state not in ("cancelling", "cancelled"):
            raise ConflictError(f"A batch that is {batch.state} cannot be cancelled.")
        return batch


async def _create(connection: Connection, new: NewBatch, max_open: int) -> UUID:
    """The id of the committed batch, or of the first one under its key. Idempotent."""
    async with connection.transaction():
        await lock_team(connection, "batches", new.team_id)
        if new.key is not None:
            await connection.execute(_FREE_KEY, new.team_id, new.key.key)
            taken = await connection.fetchrow(_BY_KEY, new.team_id, new.key.key)
            if taken is not None:
                return _same_request(taken, new.key)
        if max_open:
            count = await connection.fetchval(_COUNT, new.team_id, new.id, max_open)
            if count >= max_open:
                raise LimitError(
                    f"{max_open} batches of your team have not ended, as many as may be open "
                    "(LLM_TEAM_MAX_BATCHES). Try again when one has ended, or cancel one.",
                    headers={"Retry-After": str(_RETRY_SECONDS)},
                    extra={"limit": "max_batches", "allowed": max_open, "position": None},
                )
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
            new.token_id,
        )
    return new.id


def _same_request(taken: asyncpg.Record, key: NewKey) -> UUID:
    """The batch that has the key. Raises IdempotencyConflictError if another request made it."""
    identifier: UUID = taken["id"]
    if taken["request_hash"] != key.request_hash:
        raise IdempotencyConflictError(
            f"Batch batch_{identifier} was made under this idempotency key, by another request. "
            "Repeat that one unchanged, or take a new key.",
            extra={"batch_id": f"batch_{identifier}"},
        )
    return identifier
