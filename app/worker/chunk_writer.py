"""Writes the text of running results to the database: at once where another process reads it."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from app.core import metrics, tracing
from app.core.errors import DatabaseUnavailableError
from app.core.waiting import is_set_by
from app.queue.job_queue import JobQueue
from app.queue.progress import Chunk
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Attempt, Flushes

logger = logging.getLogger(__name__)

# Text that is read in other processes is written at once, then there is a pause as long as the write
# took, so that what comes meanwhile shares a commit, and a notification.
_MAX_PAUSE_SECONDS = 0.05  # seconds


@dataclass(slots=True)
class ChunkWriter:
    """Writer of attempts' text: at once if read elsewhere, else every `flush_seconds`."""

    queue: JobQueue
    worker_id: UUID
    running: Mapping[UUID, Attempt]
    hub: StreamHub
    watched: StreamInterest
    flush_seconds: float
    _news: set[UUID] = field(default_factory=set, init=False)  # watched results with more text
    _has_news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._is_idle.set()

    def is_read(self, result_id: UUID) -> bool:
        """Return if a stream of any process reads the result's text."""
        return self.hub.is_read(result_id) or result_id in self.watched

    def on_text(self, attempt: Attempt) -> None:
        """Write an attempt's text soon if it is read elsewhere; its end writes the last of it."""
        if attempt.claim.id in self.watched and not attempt.is_over:
            self.write_soon([attempt.claim.id])

    def write_soon(self, ids: Iterable[UUID]) -> None:
        running = [identifier for identifier in ids if identifier in self.running]
        if running:
            for identifier in running:
                self.running[identifier].live.set(True)
            self._news.update(running)
            self._has_news.set()

    async def until_idle(self) -> None:
        """Wait for the statement under way: an end removes only the chunks that it sees."""
        await self._is_idle.wait()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        all_at = loop.time() + self.flush_seconds
        while True:
            await is_set_by(self._has_news, all_at)
            watched, self._news = self._news, set()
            self._has_news.clear()
            if loop.time() >= all_at:
                all_at = loop.time() + self.flush_seconds
                for identifier, attempt in self.running.items():
                    attempt.live.set(self.is_read(identifier))
                await self._write(self.running, watched)
            else:
                began = loop.time()
                await self._write(watched, watched)
                await asyncio.sleep(min(loop.time() - began, _MAX_PAUSE_SECONDS))

    async def _write(self, ids: Iterable[UUID], watched: set[UUID]) -> None:
        attempts = [self.running[identifier] for identifier in ids if identifier in self.running]
        chunks = [chunk for attempt in attempts if (chunk := attempt.take_chunk())]
        began = time.time()
        if not chunks and not watched:
            return
        self._is_idle.clear()
        try:
            await self._append(chunks, {one: self.watched.readers(one) for one in watched})
        finally:
            self._is_idle.set()
        ended = time.time()
        metrics.FLUSH.observe(max(0.0, ended - began))
        if tracing.active is not None:
            written = {chunk.result_id for chunk in chunks}
            for one in attempts:
                if one.claim.trace and one.claim.id in written:
                    one.flushes = one.flushes or Flushes(began, ended)
                    one.flushes.add(began, ended)

    async def _append(self, chunks: list[Chunk], watched: Mapping[UUID, Collection[str]]) -> None:
        while True:
            try:
                return await self.queue.append(self.worker_id, chunks, watched)
            except DatabaseUnavailableError as error:
                extra = {"action": "flush_waits", "worker_id": str(self.worker_id)}
                logger.info("flush waits: %s", error, extra=extra)
