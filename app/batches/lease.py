"""The lease by which one process holds a batch."""

import asyncio
from dataclasses import dataclass
from uuid import UUID

from app.batches.work import BatchWork

_RENEWALS = 3  # within one lease


@dataclass(slots=True)
class BatchLease:
    """Renews the lease of a batch as often as needed."""

    work: BatchWork
    feeder_id: UUID
    batch_id: UUID
    seconds: float
    _renew_at: float = 0.0

    @property
    def renewal_seconds(self) -> float:
        return self.seconds / _RENEWALS

    async def renew(self) -> bool:
        """Hold the batch for longer; False once it has ended or another process holds it."""
        now = asyncio.get_running_loop().time()
        if now < self._renew_at:
            return True
        self._renew_at = now + self.renewal_seconds
        return await self.work.renew(self.feeder_id, self.batch_id, self.seconds)
