"""The last writes of attempts: their remaining text and their end."""

import logging
import math
from uuid import UUID

from app.core.database import is_transient
from app.core.errors import INTERNAL_ERROR
from app.queue.finish import AttemptEnd, AttemptOutcome, ResultWaiters
from app.queue.job_queue import JobQueue
from app.queue.progress import Chunk

logger = logging.getLogger(__name__)

# Seconds: an end is written once the database is back, unless the worker is fenced.
_FOREVER = math.inf


class EndWriter:
    """Commits the ends of attempts in batches, also of those whose text PostgreSQL refuses."""

    def __init__(self, queue: JobQueue, worker_id: UUID, waiters: ResultWaiters | None) -> None:
        self._worker_id = worker_id
        self._ends = queue.end_batcher(worker_id, _FOREVER, waiters)
        self._chunks = queue.chunk_batcher(worker_id, _FOREVER)

    async def store_last_text(self, chunk: Chunk) -> None:
        """Store text that the next attempt continues; if it is refused, that starts further back."""
        try:
            await self._chunks.submit(chunk)
        except Exception as error:
            if is_transient(error):
                raise
            self._log_refused("text", chunk.result_id, error)

    async def write(self, end: AttemptEnd) -> bool:
        """Commit the end, without the model's answer if that is refused; whether it was ours."""
        try:
            return await self._ends.submit(end)
        except Exception as error:
            if is_transient(error):
                raise
            self._log_refused("end", end.result_id, error)
        return await self._ends.submit(broken(end.result_id, end.attempt))

    async def close(self) -> None:
        await self._ends.close()
        await self._chunks.close()

    def _log_refused(self, subject: str, result_id: UUID, error: Exception) -> None:
        extra = {
            "action": f"{subject}_refused",
            "worker_id": str(self._worker_id),
            "result_id": str(result_id),
        }
        message = "the %s of result %s was refused"
        logger.error(message, subject, result_id, exc_info=error, extra=extra)


def broken(result_id: UUID, attempt: int) -> AttemptEnd:
    return AttemptEnd(result_id, attempt, AttemptOutcome.FAILED, failure=INTERNAL_ERROR)
