"""Processing batches: the part of a worker process that sends their lines and writes their files.

A process holds a batch by a lease; after its death another one continues. The results in flight of
a batch are bounded, and its lines wait while the queue has no room.
"""

import asyncio
import contextlib
import logging
from uuid import UUID, uuid4

from app.batches.dialect import BatchServices
from app.batches.feed import BatchFeed
from app.core.listener import BATCHES, ENDED, split_ids
from app.core.polling import PollingLoop
from app.core.waiting import cancel_all

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0  # for batches without a notification
_RELEASE_SECONDS = 1.0
_MAX_BATCHES = 64  # in one process


class BatchProcessor:
    """Processes batches until cancelled. One instance per process."""

    def __init__(self, services: BatchServices) -> None:
        self.id = uuid4()
        self._services = services
        self._lease = services.settings.lease_seconds
        self._loop = PollingLoop("batches", self._claim, seconds=min(_POLL_SECONDS, self._lease))
        self._feeds: dict[UUID, tuple[BatchFeed, asyncio.Task[None]]] = {}
        services.listener.subscribe(BATCHES, self._on_batch)
        services.listener.subscribe(ENDED, self._on_ended)

    async def run(self) -> None:
        try:
            await self._loop.run()
        finally:
            await self._release()

    async def _claim(self) -> None:
        free = _MAX_BATCHES - len(self._feeds)
        if free > 0:
            for batch_id in await self._services.work.claim(self.id, free, self._lease):
                if batch_id not in self._feeds:
                    self._start(batch_id)

    def _start(self, batch_id: UUID) -> None:
        feed = BatchFeed(self._services, self.id, batch_id)
        task = asyncio.create_task(feed.run(), name=f"batch {batch_id}")
        self._feeds[batch_id] = feed, task
        task.add_done_callback(lambda _: self._on_end(batch_id))

    def _on_end(self, batch_id: UUID) -> None:
        del self._feeds[batch_id]
        self._loop.wake()

    async def _release(self) -> None:
        ids = list(self._feeds)
        await cancel_all([task for _, task in self._feeds.values()])
        with contextlib.suppress(Exception):  # then the leases expire
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._services.work.release(self.id, ids)

    def _on_batch(self, payload: str) -> None:
        self._loop.wake()
        for feed, _ in self._feeds.values():
            if not payload or str(feed.batch_id) == payload:
                feed.notify()

    def _on_ended(self, payload: str) -> None:
        ids = split_ids(payload) if payload else None
        for feed, _ in self._feeds.values():
            feed.on_ended(ids)
