"""Batches as their teams see them: create, read, list and cancel."""

from collections.abc import Sequence
from uuid import UUID

from app.batches.creation import BY_KEY, NewBatch, create_batch, same_request
from app.batches.rows import COLUMNS, Batch
from app.core.database import Database
from app.core.errors import ConflictError, NotFoundError
from app.core.ids import HIGHEST_ID, LOWEST_ID
from app.core.listener import BATCHES
from app.queue.idempotency import NewKey

_GET = f"SELECT {COLUMNS} FROM batches WHERE id = $1 AND team_id = $2"
# Rows, not equalities: only an index that begins with the team has this order.
_LIST = f"""
SELECT {COLUMNS} FROM batches WHERE (team_id, id) >= ($1, $2) AND (team_id, id) < ($1, $3)
ORDER BY team_id DESC, id DESC LIMIT $4
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
        """Commit a new batch and notify the processors; the batch, and False for a known key.

        Raises IdempotencyConflictError, LimitError.
        """
        identifier = await self._database.run(
            lambda connection: create_batch(connection, new, self._max_open)
        )
        return await self.get(new.team_id, identifier), identifier == new.id

    async def find(self, team_id: str, key: NewKey) -> Batch | None:
        taken = await self._database.fetchrow(BY_KEY, team_id, key.key)
        return None if taken is None else await self.get(team_id, same_request(taken, key))

    async def get(self, team_id: str, batch_id: UUID) -> Batch:
        row = await self._database.fetchrow(_GET, batch_id, team_id)
        if row is None:
            raise NotFoundError(f"There is no batch {batch_id}.")
        return Batch(**row)

    async def list(self, team_id: str, after: UUID | None, limit: int) -> Sequence[Batch]:
        rows = await self._database.fetch(_LIST, team_id, LOWEST_ID, after or HIGHEST_ID, limit)
        return [Batch(**row) for row in rows]

    async def cancel(self, team_id: str, batch_id: UUID) -> Batch:
        """Stop a batch; one that is stopped already stays so. Raises ConflictError, NotFoundError."""
        await self._database.fetch(_CANCEL, batch_id, team_id)
        batch = await self.get(team_id, batch_id)
        if batch.state not in ("cancelling", "cancelled"):
            raise ConflictError(f"A batch that is {batch.state} cannot be cancelled.")
        return batch
