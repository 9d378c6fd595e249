"""One batch in the hands of this process, from its validation to its files."""

import asyncio
import logging
from collections.abc import Sequence
from uuid import UUID

from app.batches.collector import Collector
from app.batches.dialect import BatchServices
from app.batches.dispatcher import Dispatcher
from app.batches.in_flight import InFlightLines
from app.batches.lines import LineOutcomes
from app.batches.rows import Batch
from app.batches.validator import validate
from app.batches.work import BatchLease
from app.core.database import is_transient
from app.core.errors import DatabaseUnavailableError
from app.core.waiting import is_set_within

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0  # for changes without a notification
_GATHER_SECONDS = 0.05  # results that end within this time are collected together
_RETRY_SECONDS = 1.0  # while the database is unavailable
_PAGE = 100  # outcomes that are written at once


class BatchFeed:
    def __init__(self, services: BatchServices, feeder_id: UUID, batch_id: UUID) -> None:
        self.batch_id = batch_id
        self._services = services
        self._feeder_id = feeder_id
        self._signal = asyncio.Event()
        self._in_flight = InFlightLines()
        self._is_stopped = False
        self._progress = (0, 0)  # lines in flight, and lines done
        self.active_at = asyncio.get_running_loop().time()  # of its last progress
        self._lease = BatchLease(
            services.work, feeder_id, batch_id, services.settings.lease_seconds
        )
        parts = services, LineOutcomes(batch_id, services.dialect), self._in_flight, self._lease
        self._dispatcher = Dispatcher(*parts)
        self._collector = Collector(*parts)

    def notify(self) -> None:
        self._signal.set()

    def on_ended(self, ids: Sequence[UUID] | None) -> None:
        """These results have ended; None: any may have."""
        if self._in_flight.mark_ended(ids):
            self._signal.set()

    async def run(self) -> None:
        while True:
            try:
                await self._load()
                while await self._step():
                    pass
            except Exception as error:
                if is_transient(error) or isinstance(error, DatabaseUnavailableError):
                    logger.info("a batch waits: %s", error, extra=self._extra("batch_waits"))
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                # Its lease expires, and a process takes it again.
                logger.exception("batch %s broke", self.batch_id, extra=self._extra("batch_broke"))
            return

    async def _load(self) -> None:
        """Start from what is stored, by this process or an earlier one."""
        self._in_flight.load(await self._services.work.sent(self.batch_id))
        self._dispatcher.reset()
        self._collector.check_all_at = 0.0
        self._is_stopped = False

    async def _step(self) -> bool:
        """Advance the batch by one step; False once it has ended or another process holds it."""
        self._signal.clear()
        if not await self._lease.renew():
            return False
        batch = await self._services.work.look(self._feeder_id, self.batch_id)
        if batch is None:
            return False
        self._notice_progress(batch)
        if batch.finalizing_at is not None:
            await self._finalize(batch)
            return False
        is_open = batch.expected_end == "completed"
        if is_open and batch.seconds_left <= 0:
            await self._services.work.mark_expiring(self.batch_id)
        elif is_open and batch.state == "validating":
            await validate(self._services, batch, self._lease)
        else:
            await self._advance(batch)
        return True

    def _notice_progress(self, batch: Batch) -> None:
        progress = self._in_flight.result_count, batch.completed + batch.failed
        is_waiting = batch.state == "in_progress" and batch.expected_end == "completed"
        if progress != self._progress or not is_waiting:
            self._progress = progress
            self.active_at = asyncio.get_running_loop().time()

    async def _advance(self, batch: Batch) -> None:
        if batch.expected_end == "completed":
            await self._dispatcher.send(batch)
        else:
            await self._stop(batch)
        await self._collector.collect(batch)
        if self._dispatcher.is_all_sent and self._in_flight.is_empty:
            await self._services.work.begin_end(self.batch_id)
            # A delayed process that lost the batch may have sent lines since the last look: then
            # the batch does not end yet.
            await self._load()
        else:
            await self._pause(batch)

    async def _stop(self, batch: Batch) -> None:
        if not self._is_stopped:
            await self._services.work.mark_assigned_sent(self.batch_id)
            await self._load()
            self._is_stopped = True
        await self._services.queue.cancel_ids(batch.team_id, self._in_flight.result_ids)
        if batch.in_progress_at is None:  # stopped while its lines were still being stored
            self._dispatcher.is_all_sent = True
        else:
            await self._dispatcher.discard(batch)

    async def _pause(self, batch: Batch) -> None:
        seconds = self._dispatcher.seconds_until_ready()
        if seconds == 0.0:
            return
        seconds = min(_POLL_SECONDS if seconds is None else seconds, self._lease.renewal_seconds)
        is_open = batch.expected_end == "completed"
        if is_open:
            seconds = min(seconds, max(batch.seconds_left, 0.0))
        if await is_set_within(self._signal, seconds) and is_open:
            await asyncio.sleep(_GATHER_SECONDS)

    async def _finalize(self, batch: Batch) -> None:
        files, work = self._services.files, self._services.work
        output, errors = files.writer(batch.team_id), files.writer(batch.team_id)
        try:
            after = 0
            while outcomes := await work.outcomes(batch.id, after, _PAGE):
                for one in outcomes:
                    writer = output if one.is_completed else errors
                    await writer.write(one.outcome.encode() + b"\n")
                after = outcomes[-1].line
                if not await self._lease.renew():
                    return
            written = [writer if writer.size else None for writer in (output, errors)]
            for file in filter(None, written):
                await file.store_rest()
            await work.end(self._feeder_id, batch, batch.expected_end, *written)
        finally:
            await output.discard()
            await errors.discard()

    def _extra(self, action: str) -> dict[str, str]:
        return {"action": action, "batch_id": str(self.batch_id)}
