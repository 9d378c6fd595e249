"""Processing batches: the part of a worker process that sends their lines and writes their files.

A process holds a batch by a lease; after its death another one continues. The results in flight of
a batch are bounded, and its lines wait while the queue has no room.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from uuid import UUID, uuid4

from app.batches.dialect import BatchServices
from app.batches.feed import BatchFeed
from app.core.listener import BATCHES, ENDED, split_ids
from app.core.polling import PollingLoop
from app.core.waiting import cancel_all

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0  # for batches without a notification
_RELEASE_SECONDS = 1.0
_MAX_BATCHES = 128  # in one process
_CLAIM_SHARE = 8  # a claim takes one part of so many of the free places
# A batch without progress for so long leaves its place to one that waits for it.
_IDLE_SECONDS = 15.0
_MAX_YIELDS = 16  # at once


class BatchProcessor:
    """Processes batches until cancelled. One instance per process."""

    def __init__(self, services: BatchServices) -> None:
        self.id = uuid4()
        self._services = services
        self._lease = services.settings.lease_seconds
        self._loop = PollingLoop("batches", self._claim, seconds=min(_POLL_SECONDS, self._lease))
        self._feeds: dict[UUID, tuple[BatchFeed, asyncio.Task[None]]] = {}
        self._teams: dict[UUID, str] = {}  # of the batches in `_feeds`
        services.listener.subscribe(BATCHES, self._on_batch)
        services.listener.subscribe(ENDED, self._on_ended)

    async def run(self) -> None:
        try:
            await self._loop.run()
        finally:
            await self._release()

    async def _claim(self) -> None:
        """Take batches: a team may have as many places as it leaves free, so that others find some."""
        while free := _MAX_BATCHES - len(self._feeds):
            count = max(1, free // _CLAIM_SHARE)
            teams = Counter(self._teams.values())
            busy = [team for team, places in teams.items() if places >= free]
            claimed = await self._services.work.claim(self.id, count, self._lease, busy)
            for batch_id, team in claimed:
                if batch_id not in self._feeds:
                    self._start(batch_id, team)
            if len(claimed) < count:
                break
        await self._yield_places()

    async def _yield_places(self) -> None:
        """Leave the longest idle batches to any process if others wait for a place."""
        before = asyncio.get_running_loop().time() - _IDLE_SECONDS
        idle = [feed for feed, _ in self._feeds.values() if feed.active_at <= before]
        if not idle or not await self._services.work.are_free():
            return
        idle.sort(key=lambda feed: feed.active_at)
        ids = [feed.batch_id for feed in idle[:_MAX_YIELDS]]
        await cancel_all([self._feeds[batch_id][1] for batch_id in ids if batch_id in self._feeds])
        await self._services.work.yield_place(self.id, ids)

    def _start(self, batch_id: UUID, team: str) -> None:
        feed = BatchFeed(self._services, self.id, batch_id)
        task = asyncio.create_task(feed.run(), name=f"batch {batch_id}")
        self._feeds[batch_id] = feed, task
        self._teams[batch_id] = team
        task.add_done_callback(lambda _: self._on_end(batch_id))

    def _on_end(self, batch_id: UUID) -> None:
        del self._feeds[batch_id], self._teams[batch_id]
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
