"""The worker: a life under a lease, claims for its free slots, a graceful stop.

A worker lives under an id whose lease it renews. When it could not renew in time it stops its
streams, writes nothing more under that id and comes back under a new one.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from uuid import UUID

from app.core import metrics
from app.core.database import Database, is_transient
from app.core.errors import DatabaseUnavailableError
from app.core.listener import CANCELLED, ENDED, ENQUEUED, Listener, split_ids
from app.core.memory import available_memory
from app.core.settings import Settings
from app.core.waiting import cancel_all, is_set_within
from app.queue.claim import Claim
from app.queue.job_queue import JobQueue
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Backend
from app.worker.attempt_executor import AttemptExecutor
from app.worker.lease import FencedError, Lease
from app.worker.suspects import Suspects
from app.worker.throughput import Throughput

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0  # for the last writes after the grace period


class Worker:
    """Runs results until `stop` is called. One instance per process."""

    def __init__(
        self,
        database: Database,
        queue: JobQueue,
        backend: Backend,
        listener: Listener,
        hub: StreamHub,
        settings: Settings,
    ) -> None:
        self._database = database
        self._queue = queue
        self._backend = backend
        self._hub = hub
        self._settings = settings
        self._memory_bytes = settings.worker_memory_bytes or available_memory() // 2
        self._watched = StreamInterest(database, listener, hub.id, self._on_watched)
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._throughput = Throughput()
        self._lease: Lease
        self._attempts: AttemptExecutor  # of this lease
        self._is_short = True  # whether slots, not the queue, were the limit of the last claim
        self._claim_room = 0  # bytes that the claim under way may still take
        self._suspects_at = 0.0  # the loop's time for looking at them
        self._suspects = Suspects(queue, backend)
        listener.subscribe(ENQUEUED, lambda _: self._wake.set())
        listener.subscribe(CANCELLED, self._on_cancelled)
        listener.subscribe(ENDED, self._on_ended)
        backend.on_change(self._on_backend_change)

    def stop(self) -> None:
        """Stop claiming, let running results finish within the grace period, then hand back."""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        try:
            while not self._stopping.is_set():
                await self._live()
        finally:
            await self._backend.close()

    async def _live(self) -> None:
        if not await self._register():
            return
        side_tasks = [
            asyncio.create_task(task, name=f"worker {name}")
            for name, task in (
                ("heartbeat", self._lease.keep(self._attempts.load, self._attempts.check_owned)),
                ("fence", self._lease.watch_fence()),
                ("flush", self._attempts.writer.run()),
                ("silence", self._attempts.watch_silence()),
            )
        ]
        claiming = asyncio.create_task(self._claim_until_stopped(), name="worker claim")
        self._queue.dispatcher = self
        try:
            done, _ = await asyncio.wait(
                [claiming, *side_tasks], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # a dead side task ends this life, and unless fenced the process
            count = len(self._attempts.running)
            logger.info("stopping: %d results are running", count, extra=self._extra("stopping"))
            await self._attempts.finish(
                self._settings.shutdown_grace_seconds, _STOP_SECONDS, side_tasks
            )
        except FencedError as error:
            metrics.FENCES.inc()
            count = len(self._attempts.running)
            extra = self._extra("fence")
            logger.warning("fenced: %s; %d streams stopped", error, count, extra=extra)
        finally:
            await cancel_all([claiming, *side_tasks])
            await self._abandon()

    async def _register(self) -> bool:
        """Take a new id; waits for the database. False when stopped meanwhile."""
        self._lease = Lease(self._database, self._settings.lease_seconds)
        while not self._stopping.is_set():
            try:
                await self._queue.load_limits()
                await self._lease.register()
            except DatabaseUnavailableError as error:
                logger.warning("waiting for the database: %s", error, extra=self._extra("wait"))
                continue
            self._attempts = AttemptExecutor(
                self._lease.id,
                self._queue,
                self._backend,
                self._hub,
                self._watched,
                self._throughput,
                self._settings,
                self._on_end,
            )
            logger.info("worker ready", extra=self._extra("ready"))
            return True
        return False

    # --- claim and run --------------------------------------------------------------------------

    async def _claim_until_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        empty = set[str]()  # the queues that were found so since it was woken
        while not self._stopping.is_set():
            if loop.time() >= self._suspects_at:
                self._suspects_at = loop.time() + self._settings.poll_seconds
                await self._claim_suspects()
            asked = self._free_slots(empty)
            if asked:
                empty |= await self._claim(asked)
            # Otherwise the queues were empty: new results are notified, and a free slot finds none.
            self._is_short = self._room <= 0 or not empty.issuperset(self._backend.ready())
            if asked:
                continue  # there may be more, and what one queue left is for the others
            await is_set_within(self._wake, self._settings.poll_seconds)
            self._wake.clear()
            empty.clear()

    @property
    def _room(self) -> int:
        """Bytes that further results may take; the last of them may exceed it."""
        return self._memory_bytes - self._attempts.held_bytes

    def _free_slots(self, exclude: Collection[str] = ()) -> dict[str, int]:
        if self._room <= 0:
            return {}
        return self._backend.free(self._attempts.running.values(), exclude)

    # --- dispatcher of the queue: results of this process's API that need no claim --------------

    @property
    def worker_id(self) -> UUID:
        return self._lease.id

    def reserve(self, results: Sequence[tuple[str, int]]) -> list[bool]:
        """Return for each result, given by its model and expected bytes, whether it may start.

        The slots of a claim under way are not counted: at most twice as many results then run, until
        they end. Its bytes are.
        """
        if self._is_short or self._stopping.is_set():
            return [False] * len(results)
        slots, room = Counter(self._free_slots()), self._room - max(0, self._claim_room)
        reserved = []
        for model, size in results:
            slots[model] -= 1
            reserved.append(slots[model] >= 0 and room > 0)
            room -= size
        return reserved

    def begin(self, claims: Sequence[Claim]) -> None:
        self._attempts.begin(claims)

    def confirm(self, worker_id: UUID, claims: Sequence[Claim]) -> None:
        """Run results as claimed and stop others, unless they are of a former id."""
        if worker_id == self._lease.id and self._queue.dispatcher is self:
            self._attempts.confirm(claims)

    def abort(self, worker_id: UUID) -> None:
        self.confirm(worker_id, [])

    async def _claim(self, asked: dict[str, int]) -> set[str]:
        """Claim up to so many results of each model; returns the models whose queues have no more.

        A claim gets half of the room, so that new results of this process may start beside it. The
        next one gets half of the rest.
        """
        claimed = Counter[str]()
        self._claim_room = (self._room + 1) // 2
        try:
            with self._logged_if_transient():
                async for claims in self._queue.claims(self._lease.id, asked, self._claim_room):
                    self._start(claims)
                    claimed.update(claim.model_name for claim in claims)
                    self._claim_room -= sum(claim.expected_bytes for claim in claims)
            if self._claim_room <= 0:
                return set()
            return {model for model, count in asked.items() if claimed[model] < count}
        finally:
            self._claim_room = 0

    async def _claim_suspects(self) -> None:
        with self._logged_if_transient():
            await self._suspects.pause(self._attempts.running.values())
            self._start(await self._suspects.claim(self._lease.id, self._free_slots()))

    @contextlib.contextmanager
    def _logged_if_transient(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_transient(error):
                raise
            logger.info("claim failed: %s", error, extra=self._extra("claim_failed"))

    def _start(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._attempts.start(claim)

    def _on_end(self, claim: Claim) -> None:
        """A slot is free: claim if that is what claims lacked."""
        if claim.is_suspect:  # the others of its model may run now, and then the next one
            self._suspects.on_end(claim)
            self._suspects_at = 0.0
        if self._is_short or claim.is_suspect:
            self._wake.set()

    def _on_ended(self, _: str) -> None:
        """A result ended somewhere: another of its team may run now."""
        if self._queue.has_running_limits:
            self._wake.set()

    # --- notifications --------------------------------------------------------------------------

    def _on_backend_change(self) -> None:
        """A model became ready, or ceased to be: claim, and report it with a heartbeat."""
        if self._suspects.is_pause_due:  # the others come first where it is back
            self._suspects_at = 0.0
        self._wake.set()
        if self._queue.dispatcher is self:
            self._lease.hurry()

    def _on_watched(self, ids: Iterable[UUID]) -> None:
        if self._queue.dispatcher is self:
            self._attempts.writer.on_announced(ids)

    def _on_cancelled(self, payload: str) -> None:
        if self._queue.dispatcher is not self:
            return  # nothing runs
        if payload:
            self._attempts.cancel(split_ids(payload))
        else:
            self._lease.hurry()

    # --- stop -----------------------------------------------------------------------------------

    async def _abandon(self) -> None:
        self._queue.dispatcher = None
        await self._attempts.abandon()
        try:
            await self._queue.retire(self._lease.id)
        except DatabaseUnavailableError:
            logger.warning(
                "database unavailable: results are freed when the lease runs out",
                extra=self._extra("retire_failed"),
            )

    def _extra(self, action: str) -> dict[str, str]:
        return {"action": action, "worker_id": str(self._lease.id)}
