"""The lease by which one process holds a batch."""

import asyncio
from uuid import UUID

from app.batches.work import BatchWork

_RENEWALS = 3  # within one lease


class BatchLease:
    """Renews the lease of a batch as often as needed."""

    def __init__(self, work: BatchWork, feeder_id: UUID, batch_id: UUID, seconds: float) -> None:
        self.renewal_seconds = seconds / _RENEWALS
        self._work = work
        self._feeder_id = feeder_id
        self._batch_id = batch_id
        self._seconds = seconds
        self._renew_at = 0.0

    async def renew(self) -> bool:
        """Hold the batch for longer; False once it has ended or another process holds it."""
        now = asyncio.get_running_loop().time()
        if now < self._renew_at:
            return True
        self._renew_at = now + self.renewal_seconds
        return await self._work.renew(self._feeder_id, self._batch_id, self._seconds)
