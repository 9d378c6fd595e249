"""The attempts of one worker id: each runs from its claim to the commit of its end."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any
from uuid import UUID

import orjson

from app.core import logs, metrics, tracing
from app.core.database import Connection, is_transient
from app.core.errors import INTERNAL_ERROR
from app.core.ids import unix_seconds
from app.core.settings import Settings
from app.queue.job_queue import AttemptEnd, AttemptOutcome, Claim, JobQueue
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Attempt, Backend, Place, StopReason
from app.worker.chunk_writer import ChunkWriter
from app.worker.lease import Load
from app.worker.throughput import Throughput

logger = logging.getLogger(__name__)

_SILENCE_CHECK_SECONDS = 2.0
_FOREVER = math.inf  # seconds: an ended attempt is written whenever the database is back, or fenced

_Early = tuple[Attempt, asyncio.Future[bool]]  # and whether it has turned out to be ours


class AttemptExecutor:
    """Everything that runs under one worker id.

    `on_end` is called when the end of a claim is committed, or was decided elsewhere.
    """

    def __init__(
        self,
        worker_id: UUID,
        queue: JobQueue,
        backend: Backend,
        hub: StreamHub,
        watched: StreamInterest,
        throughput: Throughput,
        settings: Settings,
        on_end: Callable[[Claim], None],
    ) -> None:
        self.running: dict[UUID, Attempt] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.writer = ChunkWriter(queue, worker_id, self.running, watched, settings.flush_seconds)
        self._worker_id = worker_id
        self._queue = queue
        self._backend = backend
        self._hub = hub
        self._throughput = throughput
        self._on_end = on_end
        self._ending = queue.ending_lane(worker_id, _FOREVER, hub)
        self._keeping = queue.keeping_lane(worker_id, _FOREVER)
        self._early: dict[UUID, _Early] = {}  # whose results are just being stored
        self._unknown: set[UUID] = set()
        self._generated: Counter[str] = Counter()
        self._is_stopping = False

    # --- from claim to end ----------------------------------------------------------------------

    def start(self, claim: Claim) -> None:
        """Run a result that was claimed."""
        attempt = self._make(claim)
        self._enter(attempt)
        self._spawn(self._run(attempt), f"result {claim.id}")

    def begin(self, claims: Iterable[Claim]) -> None:
        """Generate for results while they are stored; nothing is kept of them, or told, before."""
        for claim in claims:
            attempt, is_ours = self._make(claim), asyncio.get_running_loop().create_future()
            self._early[claim.id] = (attempt, is_ours)
            self._spawn(self._run_early(attempt, is_ours), f"early {claim.id}")

    def settle(self, claims: Iterable[Claim]) -> None:
        """Run results that were stored as claimed; stop what else began."""
        early, self._early = self._early, {}
        for claim in claims:
            if claim.id in early:
                attempt, is_ours = early.pop(claim.id)
                self._enter(attempt)
                is_ours.set_result(True)
            else:
                self.start(claim)
        for attempt, is_ours in early.values():
            attempt.stop(StopReason.NOT_OURS)
            is_ours.set_result(False)

    def _make(self, claim: Claim) -> Attempt:
        return self._backend.attempt(claim, self._on_text)

    def _on_text(self, attempt: Attempt) -> None:
        self._hub.on_text(attempt)
        self.writer.on_text(attempt)

    def _enter(self, attempt: Attempt) -> None:
        if attempt.claim.trace is not None:
            self._trace_queue(attempt.claim)
        self.running[attempt.claim.id] = attempt
        self._hub.attach(attempt)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, attempt: Attempt) -> None:
        await self._conclude(attempt, await self._outcome(attempt))

    async def _run_early(self, attempt: Attempt, is_ours: asyncio.Future[bool]) -> None:
        end = await self._outcome(attempt)
        if await is_ours:
            await self._conclude(attempt, end)

    async def _outcome(self, attempt: Attempt) -> AttemptEnd | None:
        """How the attempt ended; a bug of ours ends its result too, or it would run for ever."""
        try:
            return await attempt.run()
        except Exception:
            logger.exception(
                "attempt of result %s broke",
                attempt.claim.id,
                extra=self._extra("attempt_broke", attempt.claim),
            )
            return AttemptEnd(
                attempt.claim.id,
                attempt.claim.attempt,
                AttemptOutcome.FAILED,
                failure=INTERNAL_ERROR,
            )

    async def _conclude(self, attempt: Attempt, end: AttemptEnd | None) -> None:
        """Commit the end, unless it is not ours to write, and make room for others."""
        claim, ended_at = attempt.claim, time.time()
        self._generated[claim.model_name] += attempt.generated_tokens
        try:
            if end is not None:
                metrics.ATTEMPTS.of(claim.model_name, end.outcome).inc()
                self._judge_model(attempt, end)
                if end.outcome in (AttemptOutcome.COMPLETED, AttemptOutcome.FAILED):
                    self._throughput.count(claim.model_name)
                await self.writer.until_idle()
                if end.keeps_text:
                    await self._keep_text(attempt)
                if not await self._write_end(end):
                    logger.info(
                        "result %s was decided elsewhere",
                        claim.id,
                        extra=self._extra("not_ours", claim),
                    )
                elif logger.isEnabledFor(logging.DEBUG) or logs.shows_content():
                    self._tell(claim, end)
        finally:
            if claim.trace is not None:
                self._trace_end(attempt, end, ended_at)
            if self.running.get(claim.id) is attempt:
                del self.running[claim.id]
            self._hub.detach(attempt)
            self._on_end(claim)

    async def _keep_text(self, attempt: Attempt) -> None:
        """Store the last text of an attempt that is to be continued; without it there is less."""
        chunk = attempt.take_chunk(is_last=True)
        if chunk is None:
            return
        try:
            await self._keeping.submit(chunk)
        except Exception as error:
            if is_transient(error):
                raise
            logger.exception(
                "the last text of result %s was refused",
                chunk.result_id,
                extra=self._extra("text_refused", attempt.claim),
            )

    def _trace_queue(self, claim: Claim) -> None:
        if tracing.active is not None and claim.trace is not None:
            created = unix_seconds(claim.id)
            tracing.active.record(
                "queue", claim.trace, created, time.time(), self._attributes(claim)
            )

    def _trace_end(self, attempt: Attempt, end: AttemptEnd | None, ended_at: float) -> None:
        claim = attempt.claim
        if tracing.active is None or claim.trace is None:
            return
        attributes = self._attributes(claim)
        if attempt.flushes is not None:
            # One span for all: a long answer is written a thousand times.
            flushes = {
                "llm.flushes": attempt.flushes.count,
                "llm.slowest_flush_seconds": attempt.flushes.slowest,
            }
            first, last = attempt.flushes.first, attempt.flushes.last
            tracing.active.record("flush", claim.trace, first, last, attributes | flushes)
        if end is not None:
            told: dict[str, str | int | float | bool] = {
                "llm.outcome": str(end.outcome),
                "gen_ai.usage.input_tokens": end.prompt_tokens or 0,
                "gen_ai.usage.output_tokens": end.completion_tokens or 0,
            }
            if end.failure is not None:
                told["error.type"] = str(end.failure.code)
            tracing.active.record(
                *("finish", claim.trace, ended_at, time.time(), attributes | told),
                is_error=end.failure is not None,
            )

    def _attributes(self, claim: Claim) -> dict[str, str | int | float | bool]:
        return {
            "llm.result_id": str(claim.id),
            "llm.attempt": claim.attempt,
            "llm.team_id": claim.team_id,
            "llm.worker_id": str(self._worker_id),
            "gen_ai.request.model": claim.model_name,
        }

    def _tell(self, claim: Claim, end: AttemptEnd) -> None:
        code = end.failure.code if end.failure else None
        extra = self._extra("ended", claim) | {"outcome": end.outcome, "code": code}
        if logs.shows_content():
            extra |= {"prompt": logs.cut(claim.prompt), "output": logs.cut(end.output)}
        logger.log(
            logging.INFO if logs.shows_content() else logging.DEBUG,
            "attempt of a result ended: %s",
            code or end.outcome,
            extra=extra,
        )

    async def _write_end(self, end: AttemptEnd) -> bool:
        """Commit the end; one that PostgreSQL refuses is written without what the model said."""
        try:
            return await self._ending.submit(end)
        except Exception as error:
            if is_transient(error):
                raise
            logger.exception(
                "the end of result %s was refused",
                end.result_id,
                extra=self._extra("end_refused") | {"result_id": str(end.result_id)},
            )
        bare = AttemptEnd(end.result_id, end.attempt, AttemptOutcome.FAILED, failure=INTERNAL_ERROR)
        return await self._ending.submit(bare)

    # --- models that die ------------------------------------------------------------------------

    def _judge_model(self, attempt: Attempt, end: AttemptEnd) -> None:
        if not self._is_stopping and not attempt.starts_over:
            self._backend.judge(attempt.place, end)
        if attempt.model_is_dead:
            self._stop_all_at(attempt.place)

    def _stop_all_at(self, place: Place) -> None:
        """Stop the streams of a model whose process died: Triton would let them hang."""
        for attempt in self.running.values():
            if attempt.place == place:
                attempt.stop(StopReason.MODEL_DIED)

    async def watch_silence(self) -> None:
        """Stop the attempts of dead models, until cancelled."""
        probes: dict[Place, asyncio.Task[None]] = {}  # side by side: a server that hangs takes long
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(_SILENCE_CHECK_SECONDS)
                probes = {place: task for place, task in probes.items() if not task.done()}
                for place in self._backend.silent_places(self.running.values()):
                    if place not in probes:
                        probes[place] = group.create_task(self._probe(place))

    async def _probe(self, place: Place) -> None:
        if await self._backend.is_dead(place):
            name = " on ".join(reversed(place))
            logger.warning("model %s is dead", name, extra=self._extra("model_dead"))
            self._stop_all_at(place)

    # --- heartbeat ------------------------------------------------------------------------------

    def load(self, seconds: float) -> Load:
        """What runs by model, and was done in the `seconds` since the last call; by server.

        It names what is ready here, too: of an index, nothing else tells that somebody serves it.
        """
        running = Counter(attempt.claim.model_name for attempt in self.running.values())
        generated, self._generated = self._generated, Counter()
        rates = self._throughput.beat(running.keys() | generated.keys())
        models: dict[str, dict[str, object]] = {
            model: {
                "running": running[model],
                "tokens_per_second": round(generated[model] / seconds, 1),
                "results_per_second": round(rates.get(model, 0.0), 4),
            }
            for model in rates.keys() | set(self._backend.ready())
        }
        for model, dead in self._backend.dead_engines().items():
            models.setdefault(model, {"running": running[model]})["dead"] = {
                server: {"since": one.since.isoformat(), "reason": one.reason}
                for server, one in dead.items()
            }
        servers = self._backend.servers(self.running.values())
        return Load(orjson.dumps(models).decode(), orjson.dumps(servers).decode())

    async def check_owned(self, connection: Connection) -> None:
        """Stop attempts that were cancelled or taken from us; hand back rows we do not run."""
        before = dict(self.running)
        owned = await self._queue.owned(connection, self._worker_id)
        for identifier, attempt in before.items():
            number, is_cancelled = owned.get(identifier, (0, False))
            if is_cancelled:
                attempt.stop(StopReason.CANCELLED)
            elif number != attempt.claim.attempt and self.running.get(identifier) is attempt:
                attempt.stop(StopReason.CANCELLED)  # ended or deleted: its write will find no row
        # A claim whose answer was lost with its connection; seen twice, so not one under way.
        unknown = {identifier for identifier in owned if identifier not in self.running}
        for identifier in unknown & self._unknown:
            logger.info(
                "result %s is ours and does not run: handed back",
                identifier,
                extra=self._extra("handed_back") | {"result_id": str(identifier)},
            )
            self._spawn(self._hand_back(identifier, owned[identifier][0]), f"return {identifier}")
        self._unknown = unknown

    async def _hand_back(self, result_id: UUID, attempt: int) -> None:
        await self._write_end(
            AttemptEnd(result_id, attempt, AttemptOutcome.RETURNED, keeps_text=True)
        )

    # --- stop -----------------------------------------------------------------------------------

    def cancel(self, ids: Iterable[UUID]) -> None:
        """Stop those of these results that run here: their users want no more of them."""
        for identifier in ids:
            if attempt := self.running.get(identifier):
                attempt.stop(StopReason.CANCELLED)

    async def finish(
        self,
        shutdown_grace_seconds: float,
        stop_seconds: float,
        side_tasks: Sequence[asyncio.Task[None]],
    ) -> None:
        """Let results finish, hand back the rest; a side task that dies meanwhile raises."""
        self._is_stopping = True
        await _wait_for_all(self.tasks, shutdown_grace_seconds, side_tasks)
        for attempt in self.running.values():
            attempt.stop(StopReason.SHUTDOWN)
        await _wait_for_all(self.tasks, stop_seconds, side_tasks)

    async def abandon(self) -> None:
        """Stop what still runs without a word: another worker may own it."""
        for attempt in self.running.values():
            attempt.stop(StopReason.NOT_OURS)
        await cancel_all(self.tasks)
        await self._ending.close()
        await self._keeping.close()
        for attempt in self.running.values():
            self._hub.detach(attempt)
        self.running.clear()

    def _extra(self, action: str, claim: Claim | None = None) -> dict[str, object]:
        extra: dict[str, object] = {"action": action, "worker_id": str(self._worker_id)}
        if claim is not None:
            extra |= {
                "result_id": str(claim.id),
                "attempt": claim.attempt,
                "team_id": claim.team_id,
            }
        return extra


async def _wait_for_all(
    tasks: Iterable[asyncio.Task[None]], seconds: float, side_tasks: Sequence[asyncio.Task[None]]
) -> None:
    """Wait for all tasks, for a time; a side task that dies meanwhile raises."""
    if not tasks:
        return
    everything = asyncio.ensure_future(asyncio.wait(tasks))
    try:
        await asyncio.wait(
            [everything, *side_tasks], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        everything.cancel()
    for task in side_tasks:
        if task.done():
            task.result()


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end, whatever it is."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
