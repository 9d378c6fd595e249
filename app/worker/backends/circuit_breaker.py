"""Circuit breaker of each model on each server: no work goes where a probe is not answered.

Triton calls a model ready while its engine is dead or hangs. A target whose stream was lost is
suspect: it gets no result until a probe, a generation of one token, is answered there. A failed probe
opens the circuit, and the next ones close it, so that no result is risked on a dead engine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto

from app.core.waiting import cancel_all, is_set_within
from app.inference.server_pool import DeadEngine
from app.worker.attempt import Target

# Between two probes of one target; doubles while it is not answered.
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 5.0
# After a lost stream, where the model is ready elsewhere, too: doubles with each loss in a row, so that
# a target that answers probes and loses results gets few of them.
_LOSS_PAUSE_SECONDS = 1.0
_MAX_LOSS_PAUSE_SECONDS = 30.0


class ProbeOutcome(Enum):
    ANSWERED = auto()
    FAILED = auto()  # the engine is dead, or fails
    SILENT = auto()  # nothing came in time: full, or hanging
    UNREACHED = auto()  # the server is unreachable, or the model is not ready: readiness shows it
    GONE = auto()  # the server was removed


@dataclass(slots=True, frozen=True)
class Probe:
    """Answer to one probe, and the reason of a failure."""

    answer: ProbeOutcome
    reason: str = ""


@dataclass(slots=True)
class _Circuit:
    """A target that gets no work. `dead` is set once a probe or the engine's own error proves it."""

    closes_at: float  # loop time; an earlier answer does not close it
    dead: DeadEngine | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # it closed, or is dead


class CircuitBreaker:
    """The circuits of one process. A target without a circuit is trusted.

    `probe` generates one token at a target; `on_change` is called when an engine was found dead, or
    answers again.
    """

    def __init__(
        self, probe: Callable[[Target], Awaitable[Probe]], on_change: Callable[[Target], None]
    ) -> None:
        self._probe = probe
        self._on_change = on_change
        self._circuits: dict[Target, _Circuit] = {}
        self._losses: dict[Target, int] = {}  # in a row, where the model is ready elsewhere
        self._answered_at: dict[Target, datetime] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing: dict[Target, asyncio.Future[Probe]] = {}

    def allows(self, target: Target) -> bool:
        return target not in self._circuits

    def dead(self, target: Target) -> DeadEngine | None:
        circuit = self._circuits.get(target)
        return circuit.dead if circuit else None

    def suspect(self, target: Target, *, is_only: bool = True) -> None:
        """Probe before more work goes there: a stream was lost. `is_only`: ready nowhere else."""
        now = asyncio.get_running_loop().time()
        circuit = self._circuits.get(target)
        if circuit is not None and now < circuit.closes_at:
            return  # streams that were lost together are one loss
        losses = 0 if is_only else self._losses.get(target, 0) + 1
        self._losses[target] = losses
        pause = _LOSS_PAUSE_SECONDS * 2 ** (losses - 1) if losses else 0.0
        closes_at = now + min(pause, _MAX_LOSS_PAUSE_SECONDS)
        if circuit is None:
            self._break(target, closes_at)
        else:
            circuit.closes_at = closes_at

    def on_report(self, target: Target, since: datetime) -> None:
        """Ask before more work goes there: another worker found its engine dead at that time.

        A report from before the last probe that was answered here is old.
        """
        answered_at = self._answered_at.get(target)
        if self.allows(target) and (answered_at is None or answered_at < since):
            self.suspect(target)

    def open(self, target: Target, reason: str) -> None:
        circuit = self._circuits.get(target)
        if circuit is None:
            circuit = self._break(target, asyncio.get_running_loop().time())
        is_news = circuit.dead is None
        circuit.dead = DeadEngine(circuit.dead.since if circuit.dead else datetime.now(UTC), reason)
        circuit.settled.set()
        if is_news:
            self._on_change(target)

    def succeeded(self, target: Target) -> None:
        self._losses.pop(target, None)

    async def ask(self, target: Target) -> Probe:
        """Probe a target now; concurrent callers share one probe. Opens the circuit if it fails."""
        task = self._probing.get(target)
        if task is None:
            task = asyncio.ensure_future(self._probe(target))
            self._probing[target] = task
            task.add_done_callback(lambda _: self._probing.pop(target, None))
        probe = await asyncio.shield(task)
        if probe.answer is ProbeOutcome.FAILED:
            self.open(target, probe.reason)
        return probe

    async def settled(self, target: Target, seconds: float) -> None:
        """Wait until a suspect target is trusted again, or found dead; at most so long."""
        circuit = self._circuits.get(target)
        if circuit is not None:
            await is_set_within(circuit.settled, seconds)

    async def close(self) -> None:
        await cancel_all([*self._tasks, *self._probing.values()])

    def _break(self, target: Target, closes_at: float) -> _Circuit:
        circuit = self._circuits[target] = _Circuit(closes_at)
        task = asyncio.create_task(self._recover(target, circuit), name=f"recover {target}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return circuit

    async def _recover(self, target: Target, circuit: _Circuit) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            answer = (await self.ask(target)).answer
            if answer is ProbeOutcome.GONE:
                break
            if answer is ProbeOutcome.ANSWERED and loop.time() >= circuit.closes_at:
                break
            await asyncio.sleep(max(pause, circuit.closes_at - loop.time()))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        del self._circuits[target]
        circuit.settled.set()
        self._answered_at[target] = datetime.now(UTC)
        self._on_change(target)
