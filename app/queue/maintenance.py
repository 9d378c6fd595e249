"""What every process does for all: free results of lost workers, end overdue ones, clean up.

Any number of processes may run it: each statement takes what it can lock and skips the rest.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from app.core import metrics
from app.core.database import is_transient
from app.core.settings import Settings
from app.queue.job_queue import JobQueue

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
_EXPIRED_PERIOD_SECONDS = 60.0  # an expired key or ticket only takes room
_UNBROKEN_SECONDS = 3.0  # between two looks; more means that the database was away or we slept


class Maintenance:
    """Rescue and expire, every second.

    Leases are judged only after this process has itself been connected, without a break, for a
    full lease: an outage of the database, or of this process, re-runs nothing. Nor does a jump of
    the database's clock, which may make leases look over that are not: it counts as an outage.
    """

    def __init__(self, queue: JobQueue, settings: Settings) -> None:
        self._queue = queue
        self._lease = settings.lease_seconds
        self._connected_since: float | None = None
        self._looked_at = 0.0
        self._clock_ahead = 0.0  # the database's, of our monotonic one

    async def run(self) -> None:
        """Look after the queue until cancelled."""
        while True:
            try:
                await self._look()
            except Exception as error:
                if not is_transient(error):
                    raise
                self._connected_since = None
            await asyncio.sleep(_PERIOD_SECONDS)

    async def _look(self) -> None:
        expired = await self._queue.expire()
        if expired:
            logger.info("%d results passed their deadline", expired, extra={"action": "expired"})
        ahead = await self._queue.clock() - (now := time.monotonic())
        has_jumped = abs(ahead - self._clock_ahead) > self._lease / 2
        if self._connected_since is None or now - self._looked_at > _UNBROKEN_SECONDS or has_jumped:
            self._connected_since = now
        self._looked_at, self._clock_ahead = now, ahead
        if now - self._connected_since >= self._lease:
            rescued = await self._queue.rescue(self._lease)
            if rescued:
                metrics.RESCUES.inc(rescued)
                logger.warning(
                    "%d results of lost workers were freed", rescued, extra={"action": "rescued"}
                )


async def remove_expired(removals: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run each of the removals every minute, until cancelled.

    Not part of `Maintenance`: a long removal must not delay a rescue.
    """
    while True:
        try:
            for remove in removals:
                await remove()
        except Exception as error:
            if not is_transient(error):
                raise
        await asyncio.sleep(_EXPIRED_PERIOD_SECONDS)
