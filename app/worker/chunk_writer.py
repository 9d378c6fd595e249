"""Writes the text of running results to the database, and sends it to readers in other processes."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from app.core import metrics, tracing
from app.core.errors import DatabaseUnavailableError
from app.core.waiting import is_set_by
from app.queue.job_queue import JobQueue
from app.queue.live_text import Notification, stored_notifications, text_notifications
from app.queue.progress import Chunk
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Attempt, Flushes

logger = logging.getLogger(__name__)

# Text that is read in other processes is written at once, then there is a pause as long as that took, so
# that what comes meanwhile shares a commit, and a notification.
_MAX_PAUSE_SECONDS = 0.05  # seconds


@dataclass(slots=True)
class ChunkWriter:
    """Stores attempts' text every `flush_seconds`; at once if it is read elsewhere, and sends it."""

    queue: JobQueue
    worker_id: UUID
    running: Mapping[UUID, Attempt]
    hub: StreamHub
    watched: StreamInterest
    flush_seconds: float
    _news: set[UUID] = field(default_factory=set, init=False)  # read elsewhere, with more text
    # New readers elsewhere: they may lack any of the text, which is stored for them.
    _announced: set[UUID] = field(default_factory=set, init=False)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._is_idle.set()

    def look_for_readers(self, attempt: Attempt) -> None:
        """Note the processes that read an attempt's text, and switch its output to live for them."""
        result_id = attempt.claim.id
        attempt.readers = self.watched.readers(result_id)
        attempt.live.set(bool(attempt.readers) or self.hub.is_read(result_id))

    def enter(self, attempt: Attempt) -> None:
        """Begin with an attempt that runs from now on; it may have text of before."""
        self.look_for_readers(attempt)
        if len(attempt.text) > 0:
            self.on_text(attempt)

    def on_text(self, attempt: Attempt) -> None:
        """Send an attempt's text soon if it is read elsewhere; its end has the last of it."""
        if attempt.readers and not attempt.is_over:
            self._news.add(attempt.claim.id)
            self._has_news.set()

    def on_announced(self, ids: Iterable[UUID]) -> None:
        """Store the text of running results soon, for readers elsewhere that may lack some of it."""
        running = [identifier for identifier in ids if identifier in self.running]
        if running:
            for identifier in running:
                self.look_for_readers(self.running[identifier])
            self._announced.update(running)
            self._has_news.set()

    async def until_idle(self) -> None:
        """Wait for the statement under way: an end removes only the chunks that it sees."""
        await self._is_idle.wait()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        all_at = loop.time() + self.flush_seconds
        while True:
            await is_set_by(self._has_news, all_at)
            self._has_news.clear()
            began = loop.time()
            if began >= all_at:
                all_at = began + self.flush_seconds
                for attempt in self.running.values():
                    self.look_for_readers(attempt)
                await self._write(self.running)
            else:
                await self._write(())
                await asyncio.sleep(min(loop.time() - began, _MAX_PAUSE_SECONDS))

    async def _write(self, ids: Iterable[UUID]) -> None:
        """Store the text of these results and of those with readers elsewhere, and notify of theirs."""
        announced, self._announced = self._announced & self.running.keys(), set()
        texts = []
        for attempt in self._running(self._news - announced):
            if (text := attempt.take_live()) is not None:
                texts.append((text, attempt.readers))
            else:
                announced.add(attempt.claim.id)
        chunks = self._chunks({*ids, *announced, *self._news})
        self._news = set()
        for attempt in self._running(announced):
            attempt.take_live()  # it is found in the table
        notifications = text_notifications(texts) + stored_notifications(announced)
        if chunks or notifications:
            await self._append(chunks, notifications)

    def _running(self, ids: Iterable[UUID]) -> list[Attempt]:
        attempts = (self.running.get(identifier) for identifier in ids)
        return [one for one in attempts if one is not None and not one.is_over]

    def _chunks(self, ids: Iterable[UUID]) -> list[Chunk]:
        chunks = (attempt.take_chunk() for attempt in self._running(ids))
        return [chunk for chunk in chunks if chunk is not None]

    async def _append(self, chunks: Sequence[Chunk], notifications: Sequence[Notification]) -> None:
        began = time.time()
        self._is_idle.clear()
        try:
            while True:
                try:
                    await self.queue.append(self.worker_id, chunks, notifications)
                    break
                except DatabaseUnavailableError as error:
                    extra = {"action": "flush_waits", "worker_id": str(self.worker_id)}
                    logger.info("flush waits: %s", error, extra=extra)
        finally:
            self._is_idle.set()
        ended = time.time()
        metrics.FLUSH.observe(max(0.0, ended - began))
        if tracing.active is not None:
            self._trace(chunks, began, ended)

    def _trace(self, chunks: Sequence[Chunk], began: float, ended: float) -> None:
        for chunk in chunks:
            attempt = self.running.get(chunk.result_id)
            if attempt is not None and attempt.claim.trace:
                attempt.flushes = attempt.flushes or Flushes(began, ended)
                attempt.flushes.add(began, ended)
