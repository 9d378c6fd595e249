"""The attempts of one worker id: each runs from its claim to the commit of its end."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from uuid import UUID

import orjson

from app.core import logs, metrics
from app.core.database import Connection, statement_seconds
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.queue.claim import Claim, owned_results
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.job_queue import JobQueue
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Attempt, Backend, StopReason, Target
from app.worker.attempt_trace import trace_end, trace_queue
from app.worker.chunk_writer import ChunkWriter
from app.worker.end_writer import EndWriter, broken
from app.worker.lease import Load
from app.worker.throughput import Throughput

logger = logging.getLogger(__name__)

_SILENCE_CHECK_SECONDS = 2.0

_Early = tuple[Attempt, asyncio.Future[bool]]  # whether it is ours, once that is known


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
        self.held_bytes = 0  # that the attempts may hold, as expected
        self.tasks: set[asyncio.Task[None]] = set()
        self.writer = ChunkWriter(
            *(queue, worker_id, self.running, hub, watched, settings.flush_seconds)
        )
        self._worker_id = worker_id
        self._backend = backend
        self._hub = hub
        self._throughput = throughput
        self._on_end = on_end
        self._ends = EndWriter(queue, worker_id, hub)
        self._early: dict[UUID, _Early] = {}  # their results are being stored
        self._unknown: dict[UUID, float] = {}  # owned and not running, since this loop time
        self._statement_seconds = statement_seconds(settings)
        self._generated: Counter[str] = Counter()
        self._is_stopping = False

    # --- from claim to end ----------------------------------------------------------------------

    def start(self, claim: Claim) -> None:
        attempt = self._new_attempt(claim)
        self._enter(attempt)
        self._spawn(self._run(attempt), f"result {claim.id}")

    def begin(self, claims: Iterable[Claim]) -> None:
        """Generate for results while they are stored; readers get nothing of them before."""
        for claim in claims:
            attempt = self._new_attempt(claim)
            is_ours = asyncio.get_running_loop().create_future()
            self._early[claim.id] = (attempt, is_ours)
            self._spawn(self._run(attempt, is_ours), f"early {claim.id}")

    def confirm(self, claims: Iterable[Claim]) -> None:
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

    def _new_attempt(self, claim: Claim) -> Attempt:
        self.held_bytes += claim.expected_bytes
        attempt = self._backend.attempt(claim, self._on_text)
        self.writer.look_for_readers(attempt)
        return attempt

    def _on_text(self, attempt: Attempt) -> None:
        self._hub.on_text(attempt)
        self.writer.on_text(attempt)

    def _enter(self, attempt: Attempt) -> None:
        trace_queue(attempt.claim, self._worker_id)
        self.running[attempt.claim.id] = attempt
        self.writer.enter(attempt)
        self._hub.attach(attempt)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, attempt: Attempt, is_ours: asyncio.Future[bool] | None = None) -> None:
        end = await self._run_safely(attempt)
        if is_ours is None or await is_ours:
            await self._conclude(attempt, end)
        else:
            self.held_bytes -= attempt.claim.expected_bytes

    async def _run_safely(self, attempt: Attempt) -> AttemptEnd | None:
        """A bug of ours ends the result, too; it would never end otherwise."""
        try:
            return await attempt.run()
        except Exception:
            claim = attempt.claim
            extra = self._extra("attempt_broke", claim)
            logger.exception("attempt of result %s broke", claim.id, extra=extra)
            return broken(claim.id, claim.attempt)

    async def _conclude(self, attempt: Attempt, end: AttemptEnd | None) -> None:
        claim, ended_at = attempt.claim, time.time()
        self._generated[claim.model_name] += attempt.generated_tokens
        try:
            if end is not None:
                metrics.ATTEMPTS.of(claim.model_name, end.outcome).inc()
                self._record_outcome(attempt, end)
                if end.outcome in (AttemptOutcome.COMPLETED, AttemptOutcome.FAILED):
                    self._throughput.count(claim.model_name)
                if attempt.has_chunks:
                    await self.writer.until_idle()
                if end.keeps_text and (chunk := attempt.take_chunk(is_last=True)):
                    await self._ends.store_last_text(chunk)
                if not await self._ends.write(end):
                    extra = self._extra("not_ours", claim)
                    logger.info("result %s was decided elsewhere", claim.id, extra=extra)
                elif logger.isEnabledFor(logging.DEBUG) or logs.shows_content():
                    self._log_end(claim, end)
        finally:
            trace_end(attempt, end, ended_at, self._worker_id)
            if self.running.get(claim.id) is attempt:
                del self.running[claim.id]
            self._hub.detach(attempt)
            self.held_bytes -= claim.expected_bytes
            self._on_end(claim)

    def _log_end(self, claim: Claim, end: AttemptEnd) -> None:
        code = end.failure.code if end.failure else None
        extra = self._extra("ended", claim) | {"outcome": end.outcome, "code": code}
        if logs.shows_content():
            extra |= {"prompt": logs.cut(claim.prompt), "output": logs.cut(end.output)}
        level = logging.INFO if logs.shows_content() else logging.DEBUG
        logger.log(level, "attempt of a result ended: %s", code or end.outcome, extra=extra)

    # --- models that die ------------------------------------------------------------------------

    def _record_outcome(self, attempt: Attempt, end: AttemptEnd) -> None:
        if not self._is_stopping and not attempt.starts_over:
            self._backend.record_outcome(attempt.target, end)
        if attempt.model_is_dead:
            self._stop_all_at(attempt.target)

    def _stop_all_at(self, target: Target) -> None:
        """Stop the streams of a model whose process died: Triton would let them hang."""
        for attempt in self.running.values():
            if attempt.target == target:
                attempt.stop(StopReason.MODEL_DIED)

    async def watch_silence(self) -> None:
        # Side by side: a server that hangs takes long.
        probes: dict[Target, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(_SILENCE_CHECK_SECONDS)
                probes = {target: task for target, task in probes.items() if not task.done()}
                for target in self._backend.silent_targets(self.running.values()):
                    if target not in probes:
                        probes[target] = group.create_task(self._probe(target))

    async def _probe(self, target: Target) -> None:
        if await self._backend.is_dead(target):
            name = " on ".join(reversed(target))
            logger.warning("model %s is dead", name, extra=self._extra("model_dead"))
            self._stop_all_at(target)

    # --- heartbeat ------------------------------------------------------------------------------

    def load(self, seconds: float) -> Load:
        """Return the load over the `seconds` since the last call, also of idle ready models."""
        running = Counter(attempt.claim.model_name for attempt in self.running.values())
        generated, self._generated = self._generated, Counter()
        rates = self._throughput.beat(running.keys() | generated.keys())
        dead = self._backend.dead_engines()
        models: dict[str, dict[str, object]] = {
            model: {
                "running": running[model],
                "tokens_per_second": round(generated[model] / seconds, 1),
                "results_per_second": round(rates.get(model, 0.0), 4),
            }
            for model in rates.keys() | set(self._backend.ready()) | dead.keys()
        }
        for model, engines in dead.items():
            models[model]["dead"] = {
                server: {"since": one.since.isoformat(), "reason": one.reason}
                for server, one in engines.items()
            }
        servers = self._backend.servers(self.running.values())
        return Load(orjson.dumps(models).decode(), orjson.dumps(servers).decode())

    async def check_owned(self, connection: Connection) -> None:
        """Stop attempts that were cancelled or lost; return results of ours that do not run."""
        before = dict(self.running)
        owned = await owned_results(connection, self._worker_id)
        for identifier, attempt in before.items():
            number, is_cancelled = owned.get(identifier, (0, False))
            if is_cancelled:
                attempt.stop(StopReason.CANCELLED)
            elif number != attempt.claim.attempt and self.running.get(identifier) is attempt:
                attempt.stop(StopReason.CANCELLED)  # ended or deleted: its write will find no row
        # A claim whose answer was lost with its connection: unknown for longer than a statement may
        # be under way. One heartbeat may follow another at once.
        now = asyncio.get_running_loop().time()
        self._unknown = {
            one: self._unknown.get(one, now) for one in owned if one not in self.running
        }
        for identifier, since in self._unknown.items():
            if now - since > self._statement_seconds:
                extra = self._extra("handed_back") | {"result_id": str(identifier)}
                logger.info("result %s does not run: handed back", identifier, extra=extra)
                returning = self._hand_back(identifier, owned[identifier][0])
                self._spawn(returning, f"return {identifier}")

    async def _hand_back(self, result_id: UUID, attempt: int) -> None:
        await self._ends.write(
            AttemptEnd(result_id, attempt, AttemptOutcome.RETURNED, keeps_text=True)
        )

    # --- stop -----------------------------------------------------------------------------------

    def cancel(self, ids: Iterable[UUID]) -> None:
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
        """Stop all attempts and write nothing: another worker may own their results."""
        for attempt in self.running.values():
            attempt.stop(StopReason.NOT_OURS)
        await cancel_all(self.tasks)
        await self._ends.close()
        for attempt in self.running.values():
            self._hub.detach(attempt)
        self.running.clear()

    def _extra(self, action: str, claim: Claim | None = None) -> dict[str, object]:
        extra: dict[str, object] = {"action": action, "worker_id": str(self._worker_id)}
        if claim is not None:
            extra["result_id"] = str(claim.id)
            extra["attempt"], extra["team_id"] = claim.attempt, claim.team_id
        return extra


async def _wait_for_all(
    tasks: Iterable[asyncio.Task[None]], seconds: float, side_tasks: Sequence[asyncio.Task[None]]
) -> None:
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
