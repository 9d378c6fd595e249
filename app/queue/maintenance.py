"""Maintenance of the queue: release results of lost workers, expire overdue ones, clean up.

Any number of processes may run it: each statement takes the rows that it can lock and skips the rest.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from app.core import metrics
from app.core.polling import PollingLoop
from app.core.settings import Settings
from app.queue import api_processes
from app.queue.job_queue import JobQueue

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
_EXPIRED_PERIOD_SECONDS = 60.0  # an expired key or ticket only takes room
# Between two looks; more means an outage of the database or of this process.
_UNBROKEN_SECONDS = 3.0


class Maintenance:
    """Rescue and expire, every second.

    Leases are judged only after this process has itself been connected, without a break, for as
    long as they are: an outage of the database, or of this process, re-runs nothing. A jump of the
    database's clock, which may make leases look over that are not, counts as an outage.
    """

    def __init__(self, queue: JobQueue, settings: Settings) -> None:
        self._queue = queue
        self._lease = settings.lease_seconds
        self._connected_since: float | None = None
        self._looked_at = 0.0
        self._clock_ahead = 0.0  # the database's, of our monotonic one

    async def run(self) -> None:
        await PollingLoop("maintenance", self._look, seconds=_PERIOD_SECONDS).run()

    async def _look(self) -> None:
        since, self._connected_since = self._connected_since, None  # if an error ends this look
        expired = await self._queue.expire()
        if expired:
            logger.info("%d results passed their deadline", expired, extra={"action": "expired"})
        ahead = await self._queue.clock() - (now := time.monotonic())
        has_jumped = abs(ahead - self._clock_ahead) > self._lease / 2
        if since is None or now - self._looked_at > _UNBROKEN_SECONDS or has_jumped:
            since = now
        self._looked_at, self._clock_ahead = now, ahead
        if now - since >= self._lease:
            rescued = await self._queue.rescue(self._lease)
            if rescued:
                metrics.RESCUES.inc(rescued)
                extra = {"action": "rescued"}
                logger.warning("%d results of lost workers were freed", rescued, extra=extra)
        if now - since >= api_processes.LEASE_SECONDS:
            cancelled = await self._queue.cancel_abandoned()
            if cancelled:
                text = "%d results of lost API processes were cancelled"
                logger.warning(text, cancelled, extra={"action": "abandoned"})
        self._connected_since = since


async def keep_statistics(queue: JobQueue) -> None:
    """Have the statistics of the queue's table follow its growth; a long analysis must not delay a rescue."""
    await PollingLoop("statistics", queue.analyze_growth, seconds=_PERIOD_SECONDS).run()


async def remove_expired(removals: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run each of the removals every minute; a long one must not delay a rescue."""

    async def remove_all() -> None:
        for remove in removals:
            await remove()

    await PollingLoop("removal", remove_all, seconds=_EXPIRED_PERIOD_SECONDS).run()
