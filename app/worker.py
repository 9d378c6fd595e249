"""The worker: claim, generate, flush, end; graceful stop.

A worker lives under an id whose lease it renews. When it could not renew in time it stops its
streams, writes nothing more under that id and comes back under a new one.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import orjson

from app.database import Connection, Database, is_passing
from app.errors import INTERNAL_ERROR, DatabaseUnavailableError
from app.group_commit import Lane
from app.job_queue import AttemptEnd, Chunk, Claim, JobQueue, Outcome
from app.lease import FencedError, Lease
from app.listener import CANCELLED, ENQUEUED, Listener
from app.model_registry import ModelRegistry
from app.model_trust import ModelTrust
from app.runner import Attempt, StopReason
from app.settings import Settings
from app.stream_hub import StreamHub
from app.throughput import Throughput
from app.triton_client import TritonClient
from app.waiting import is_set_by, is_set_within
from app.watched import Watched

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SILENCE_CHECK_SECONDS = 2.0
_STOP_SECONDS = 5.0  # for the last writes after the grace period
_Early = tuple[Attempt, asyncio.Task[AttemptEnd | None]]

_FOREVER = 1e9  # seconds: an ended attempt is written whenever the database is back, or fenced
# Between two writes of text that is read in other processes: they share a commit, and a notification.
_WATCHED_FLUSH_SECONDS = 0.005


class Worker:
    """Runs results until `stop` is called. One instance per process."""

    def __init__(
        self,
        database: Database,
        queue: JobQueue,
        triton: TritonClient,
        registry: ModelRegistry,
        listener: Listener,
        hub: StreamHub,
        settings: Settings,
    ) -> None:
        self._database = database
        self._queue = queue
        self._triton = triton
        self._registry = registry
        self._hub = hub
        self._settings = settings
        self._watched = Watched(database, listener, hub.id, self._tell)
        self._untold: set[UUID] = set()  # watched results with news
        self._has_untold = asyncio.Event()
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._trust = ModelTrust(triton)
        self._lease: Lease
        self._ending: Lane[AttemptEnd, bool]
        self._running: dict[UUID, Attempt] = {}
        self._early: dict[UUID, _Early] = {}  # whose results are just being stored
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_short = True  # whether slots, not the queue, were the limit of the last claim
        self._unknown: set[UUID] = set()
        self._nothing_is_flushed = asyncio.Event()
        self._nothing_is_flushed.set()
        self._generated: Counter[str] = Counter()
        self._throughput = Throughput()
        listener.subscribe(ENQUEUED, lambda _: self._wake.set())
        listener.subscribe(CANCELLED, self._on_cancelled)
        registry.on_change(self._wake.set)

    def stop(self) -> None:
        """Stop claiming, let running results finish within the grace period, then hand back."""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Live under one id after another until stopped."""
        while not self._stopping.is_set():
            await self._live()

    async def _live(self) -> None:
        if not await self._register():
            return
        side_tasks = [
            asyncio.create_task(task, name=f"worker {name}")
            for name, task in (
                ("heartbeat", self._lease.keep(self._load, self._check_owned)),
                ("fence", self._lease.watch_fence()),
                ("flush", self._flush()),
                ("silence", self._watch_silence()),
            )
        ]
        claiming = asyncio.create_task(self._claim_until_stopped(), name="worker claim")
        self._queue.birthplace = self
        try:
            done, _ = await asyncio.wait(
                [claiming, *side_tasks], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # a dead side task ends this life, and unless fenced the process
            await self._finish_within_grace(side_tasks)
        except FencedError as error:
            logger.warning(
                "fenced: %s; %d streams stopped",
                error,
                len(self._running),
                extra=self._extra("fence"),
            )
        finally:
            await _cancel_all([claiming, *side_tasks])
            await self._abandon()

    async def _register(self) -> bool:
        """Take a new id; waits for the database. False when stopped meanwhile."""
        self._lease = Lease(self._database, self._settings.lease_seconds)
        while not self._stopping.is_set():
            try:
                await self._lease.register()
            except DatabaseUnavailableError as error:
                logger.warning("waiting for the database: %s", error, extra=self._extra("wait"))
                continue
            self._ending = self._queue.ending_lane(self._lease.id, _FOREVER, self._hub)
            logger.info("worker ready", extra=self._extra("ready"))
            return True
        return False

    # --- claim and run --------------------------------------------------------------------------

    async def _claim_until_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        suspects_at = loop.time()
        while not self._stopping.is_set():
            self._wake.clear()
            if loop.time() >= suspects_at:
                await self._claim_suspects()
                suspects_at = loop.time() + self._settings.poll_seconds
            asked = self._free_slots()
            claimed = await self._claim(asked) if asked else Counter[str]()
            # Else the queue was empty: what comes is notified, and a free slot finds nothing.
            self._is_short = len(asked) < len(self._registry.ready()) or any(
                claimed[model] >= count for model, count in asked.items()
            )
            if asked and claimed.total() >= sum(asked.values()):
                continue  # there may be more
            await is_set_within(self._wake, self._settings.poll_seconds)

    def _free_slots(self) -> dict[str, int]:
        """The free slots, shared between the ready models."""
        free = self._settings.worker_slots - len(self._running)
        models = self._registry.ready()
        if free <= 0 or not models:
            return {}
        # The models that run least here are served first when there are fewer slots than models.
        running = Counter(attempt.claim.model_name for attempt in self._running.values())
        models.sort(key=lambda name: running[name])
        share, rest = divmod(free, len(models))
        slots = {name: share + (place < rest) for place, name in enumerate(models)}
        return self._trust.restrict(slots, self._running.values())

    # The queue's birthplace: results of this process's API that need not wait for a claim.

    @property
    def worker_id(self) -> UUID:
        """The id that this worker lives under."""
        return self._lease.id

    def may_start(self, models: Sequence[str]) -> list[bool]:
        """Which new results of these models have a place here now.

        Not counting what a claim under way may bring: for a moment there may be twice the slots.
        """
        if self._is_short or self._stopping.is_set():
            return [False] * len(models)
        slots = self._free_slots()
        taken = Counter[str]()
        places = []
        for model in models:
            places.append(taken[model] < slots.get(model, 0))
            taken[model] += 1
        return places

    def begin(self, claims: Sequence[Claim]) -> None:
        """Generate for results while they are stored; nothing is kept of them, or told, before."""
        for claim in claims:
            attempt = Attempt(claim, self._triton, self._on_text)
            outcome = self._spawn(self._outcome(attempt), f"early {claim.id}")
            self._early[claim.id] = (attempt, outcome)

    def settle(self, worker_id: UUID, claims: Sequence[Claim]) -> None:
        """Run results that were stored as claimed; stop what else began.

        What was claimed under a former id of this worker has been freed with it.
        """
        early, self._early = self._early, {}
        if worker_id == self._lease.id and self._queue.birthplace is self:
            for claim in claims:
                self._start_one(claim, early.pop(claim.id, None))
        for attempt, _ in early.values():
            attempt.stop(StopReason.NOT_OURS)

    async def _claim(self, asked: dict[str, int]) -> Counter[str]:
        """Claim and start what is there; how much, by model."""
        try:
            claims = await self._queue.claim(self._lease.id, asked)
        except Exception as error:
            if not is_passing(error):
                raise
            logger.info("claim failed: %s", error, extra=self._extra("claim_failed"))
            return Counter()
        self._start(claims)
        return Counter(claim.model_name for claim in claims)

    async def _claim_suspects(self) -> None:
        models = list(self._free_slots())
        if not models:
            return
        try:
            self._start(await self._queue.claim_suspects(self._lease.id, models))
        except Exception as error:
            if not is_passing(error):
                raise
            logger.info("claim failed: %s", error, extra=self._extra("claim_failed"))

    def _start(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._start_one(claim)

    def _start_one(self, claim: Claim, early: _Early | None = None) -> None:
        """Run a claim, or go on with what began before it was ours."""
        attempt, outcome = early or (Attempt(claim, self._triton, self._on_text), None)
        self._running[claim.id] = attempt
        self._hub.attach(attempt)
        self._spawn(self._run(attempt, outcome), f"result {claim.id}")

    def _spawn(self, work: Coroutine[None, None, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, attempt: Attempt, early: asyncio.Task[AttemptEnd | None] | None) -> None:
        claim = attempt.claim
        try:
            end = await (early or self._outcome(attempt))
            self._generated[claim.model_name] += attempt.completion_tokens
            if end is not None:
                self._judge_model(attempt, end)
                if end.outcome in (Outcome.COMPLETED, Outcome.FAILED):
                    self._throughput.count(claim.model_name)
                # The end removes the chunks that it sees: not one that is just being written.
                await self._nothing_is_flushed.wait()
                if not await self._write_end(end):
                    logger.info(
                        "result %s was decided elsewhere", claim.id, extra=self._extra("not_ours")
                    )
        finally:
            if self._running.get(claim.id) is attempt:
                del self._running[claim.id]
            self._hub.detach(attempt)
            if self._is_short or claim.is_suspect:
                self._wake.set()
        if claim.is_suspect:
            await self._claim_suspects()

    async def _outcome(self, attempt: Attempt) -> AttemptEnd | None:
        """How the attempt ended; a bug of ours ends its result too, or it would run for ever."""
        try:
            return await attempt.run()
        except Exception:
            logger.exception(
                "attempt of result %s broke", attempt.claim.id, extra=self._extra("attempt_broke")
            )
            return AttemptEnd(
                attempt.claim.id, attempt.claim.attempt, Outcome.FAILED, failure=INTERNAL_ERROR
            )

    async def _write_end(self, end: AttemptEnd) -> bool:
        """Commit the end; one that PostgreSQL refuses is written without what the model said."""
        try:
            return await self._ending.submit(end)
        except Exception as error:
            if is_passing(error):
                raise
            logger.exception(
                "the end of result %s was refused",
                end.result_id,
                extra=self._extra("end_refused"),
            )
        bare = AttemptEnd(end.result_id, end.attempt, Outcome.FAILED, failure=INTERNAL_ERROR)
        return await self._ending.submit(bare)

    def _judge_model(self, attempt: Attempt, end: AttemptEnd) -> None:
        model = attempt.claim.model_name
        if not self._stopping.is_set():
            self._trust.judge(model, end)
        if attempt.model_is_dead:
            self._stop_all_of(model)

    def _stop_all_of(self, model: str) -> None:
        """Stop the streams of a model whose process died: Triton would let them hang."""
        for attempt in self._running.values():
            if attempt.claim.model_name == model:
                attempt.stop(StopReason.MODEL_DIED)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(_SILENCE_CHECK_SECONDS)
            for model in await self._trust.find_dead(list(self._running.values())):
                logger.warning("model %s is dead", model, extra=self._extra("model_dead"))
                self._stop_all_of(model)

    # --- text of running results ----------------------------------------------------------------

    def _on_text(self, attempt: Attempt) -> None:
        self._hub.on_text(attempt)
        if attempt.claim.id in self._watched:
            self._tell([attempt.claim.id])

    def _tell(self, ids: Iterable[UUID]) -> None:
        """Write these results' text soon, and tell who reads it in other processes."""
        news = [identifier for identifier in ids if identifier in self._running]
        if news:
            self._untold.update(news)
            self._has_untold.set()

    async def _flush(self) -> None:
        """Keep the text of running results in the database, all of them in one statement.

        What is read elsewhere is written at once, the rest now and then.
        """
        loop = asyncio.get_running_loop()
        all_at = loop.time() + self._settings.flush_seconds
        while True:
            await is_set_by(self._has_untold, all_at)
            told, self._untold = self._untold, set()
            self._has_untold.clear()
            if loop.time() >= all_at:
                all_at = loop.time() + self._settings.flush_seconds
                await self._keep(self._running, told)
            else:
                await self._keep(told, told)
                await asyncio.sleep(_WATCHED_FLUSH_SECONDS)

    async def _keep(self, ids: Iterable[UUID], told: set[UUID]) -> None:
        attempts = [self._running[identifier] for identifier in ids if identifier in self._running]
        chunks = [chunk for attempt in attempts if (chunk := attempt.take_chunk())]
        if not chunks and not told:
            return
        self._nothing_is_flushed.clear()
        try:
            await self._append(chunks, list(told))
        finally:
            self._nothing_is_flushed.set()

    async def _append(self, chunks: list[Chunk], told: list[UUID]) -> None:
        while True:
            try:
                return await self._queue.append(self._lease.id, chunks, told)
            except DatabaseUnavailableError as error:
                logger.info("flush waits: %s", error, extra=self._extra("flush_waits"))

    # --- heartbeat ------------------------------------------------------------------------------

    def _load(self) -> str:
        """What this worker does by model, as JSON, since the last call."""
        running = Counter(attempt.claim.model_name for attempt in self._running.values())
        generated, self._generated = self._generated, Counter()
        rates = self._throughput.beat(running.keys() | generated.keys())
        return orjson.dumps(
            {
                model: {
                    "running": running[model],
                    "tokens_per_second": round(generated[model] / self._lease.period, 1),
                    "results_per_second": round(rate, 4),
                }
                for model, rate in rates.items()
            }
        ).decode()

    async def _check_owned(self, connection: Connection) -> None:
        """Stop attempts that were cancelled or taken from us; hand back rows we do not run."""
        before = {identifier: self._running[identifier] for identifier in self._running}
        owned = await self._queue.owned(connection, self._lease.id)
        for identifier, attempt in before.items():
            number, is_cancelled = owned.get(identifier, (0, False))
            if is_cancelled:
                attempt.stop(StopReason.CANCELLED)
            elif number != attempt.claim.attempt and self._running.get(identifier) is attempt:
                attempt.stop(StopReason.CANCELLED)  # ended or deleted: its write will find no row
        # A claim whose answer was lost with its connection; seen twice, so not one under way.
        unknown = {identifier for identifier in owned if identifier not in self._running}
        for identifier in unknown & self._unknown:
            end = AttemptEnd(identifier, owned[identifier][0], Outcome.RETURNED)
            self._spawn(self._write_end(end), f"return {identifier}")
        self._unknown = unknown

    def _on_cancelled(self, payload: str) -> None:
        if not payload:
            self._lease.hurry()
            return
        for digits in payload.split(","):
            attempt = self._running.get(UUID(hex=digits))
            if attempt is not None:
                attempt.stop(StopReason.CANCELLED)

    # --- stop -----------------------------------------------------------------------------------

    async def _finish_within_grace(self, side_tasks: list[asyncio.Task[None]]) -> None:
        """Let results finish, hand back the rest; the lease is renewed meanwhile."""
        logger.info(
            "stopping: %d results are running", len(self._running), extra=self._extra("stopping")
        )
        await _wait_for_all(self._tasks, self._settings.grace_seconds, side_tasks)
        for attempt in self._running.values():
            attempt.stop(StopReason.SHUTDOWN)
        await _wait_for_all(self._tasks, _STOP_SECONDS, side_tasks)

    async def _abandon(self) -> None:
        """End this id: stop what still runs without a word, and hand its rows back."""
        self._queue.birthplace = None
        for attempt in self._running.values():
            attempt.stop(StopReason.NOT_OURS)
        await _cancel_all(self._tasks)
        await self._ending.close()
        for attempt in self._running.values():
            self._hub.detach(attempt)
        self._running.clear()
        try:
            await self._queue.retire(self._lease.id)
        except DatabaseUnavailableError:
            logger.warning(
                "the database is away: results are freed when the lease runs out",
                extra=self._extra("retire_failed"),
            )

    def _extra(self, action: str) -> dict[str, str]:
        return {"action": action, "worker_id": str(self._lease.id)}


async def _wait_for_all(
    tasks: set[asyncio.Task[object]], seconds: float, side_tasks: list[asyncio.Task[None]]
) -> None:
    """Wait for all tasks, for a time; a side task that dies meanwhile raises."""
    everything = asyncio.ensure_future(asyncio.wait(tasks)) if tasks else None
    if everything is None:
        return
    try:
        await asyncio.wait(
            [everything, *side_tasks], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        everything.cancel()
    for task in side_tasks:
        if task.done():
            task.result()


async def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
