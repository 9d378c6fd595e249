"""Circuit breaker of each model on each server: no work goes where a probe is not answered.

Triton calls a model ready while its engine is dead or stands still. A place whose stream was lost is
suspect: it gets no result until a probe, a generation of one token, is answered there. A failed probe
opens the circuit, and the next ones close it, so that no result is risked on a dead engine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from app.core.waiting import is_set_within
from app.inference.server_pool import DeadEngine
from app.worker.attempt import Place

# Between two probes of one place; doubles while it is not answered.
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 5.0
# After a lost stream, where the model is ready elsewhere, too: doubles with each loss in a row, so that
# a place that answers probes and loses results gets few of them.
_LOSS_PAUSE_SECONDS = 1.0
_MAX_LOSS_PAUSE_SECONDS = 30.0


class ProbeOutcome(Enum):
    """What came of a probe."""

    ANSWERED = auto()
    FAILED = auto()  # the engine is dead, or fails
    SILENT = auto()  # nothing came in time: full, or standing still
    UNREACHED = auto()  # the server is away, or the model is not ready: readiness shows it
    GONE = auto()  # the server was removed


@dataclass(slots=True, frozen=True)
class Probe:
    """The outcome of one probe; `reason` says what is wrong."""

    answer: ProbeOutcome
    reason: str = ""


@dataclass(slots=True)
class _Circuit:
    """A place that gets no work. `dead` is set once a probe or the engine's own error proves it."""

    closes_at: float  # loop time; an earlier answer does not close it
    dead: DeadEngine | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # it closed, or is dead


class CircuitBreaker:
    """The circuits of one process. A place without a circuit is trusted.

    `probe` generates one token at a place; `on_change` is called when an engine was found dead, or
    answers again.
    """

    def __init__(
        self, probe: Callable[[Place], Awaitable[Probe]], on_change: Callable[[Place], None]
    ) -> None:
        self._probe = probe
        self._on_change = on_change
        self._circuits: dict[Place, _Circuit] = {}
        self._losses: dict[Place, int] = {}  # in a row, where the model is ready elsewhere
        self._answered_at: dict[Place, datetime] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing: dict[Place, asyncio.Future[Probe]] = {}

    def allows(self, place: Place) -> bool:
        """Return whether results may be sent there."""
        return place not in self._circuits

    def dead(self, place: Place) -> DeadEngine | None:
        """Return since when the engine there is known to be dead, and why."""
        circuit = self._circuits.get(place)
        return circuit.dead if circuit else None

    def suspect(self, place: Place, *, is_only: bool = True) -> None:
        """Ask before more work goes there: a stream was lost, or not taken.

        `is_only`: the model is ready nowhere else.
        """
        now = asyncio.get_running_loop().time()
        circuit = self._circuits.get(place)
        if circuit is not None and now < circuit.closes_at:
            return  # streams that were lost together are one loss
        losses = 0 if is_only else self._losses.get(place, 0) + 1
        self._losses[place] = losses
        pause = _LOSS_PAUSE_SECONDS * 2 ** (losses - 1) if losses else 0.0
        closes_at = now + min(pause, _MAX_LOSS_PAUSE_SECONDS)
        if circuit is None:
            self._break(place, closes_at)
        else:
            circuit.closes_at = closes_at

    def on_report(self, place: Place, since: datetime) -> None:
        """Ask before more work goes there: another worker found its engine dead at that time.

        A report from before the last probe that was answered here is old.
        """
        answered_at = self._answered_at.get(place)
        if self.allows(place) and (answered_at is None or answered_at < since):
            self.suspect(place)

    def open(self, place: Place, reason: str) -> None:
        """Send nothing there before a probe is answered: the engine is dead."""
        circuit = self._circuits.get(place)
        if circuit is None:
            circuit = self._break(place, asyncio.get_running_loop().time())
        is_news = circuit.dead is None
        circuit.dead = DeadEngine(circuit.dead.since if circuit.dead else datetime.now(UTC), reason)
        circuit.settled.set()
        if is_news:
            self._on_change(place)

    def succeeded(self, place: Place) -> None:
        """A result ended there as it should: losses before it are forgotten."""
        self._losses.pop(place, None)

    async def ask(self, place: Place) -> Probe:
        """Probe a place now; concurrent callers share one probe. Opens the circuit if it fails."""
        task = self._probing.get(place)
        if task is None:
            task = asyncio.ensure_future(self._probe(place))
            self._probing[place] = task
            task.add_done_callback(lambda _: self._probing.pop(place, None))
        probe = await asyncio.shield(task)
        if probe.answer is ProbeOutcome.FAILED:
            self.open(place, probe.reason)
        return probe

    async def settled(self, place: Place, seconds: float) -> None:
        """Wait until a suspect place is trusted again, or found dead; at most so long."""
        circuit = self._circuits.get(place)
        if circuit is not None:
            await is_set_within(circuit.settled, seconds)

    async def close(self) -> None:
        """End all probes."""
        tasks: list[asyncio.Future[Any]] = [*self._tasks, *self._probing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _break(self, place: Place, closes_at: float) -> _Circuit:
        circuit = self._circuits[place] = _Circuit(closes_at)
        task = asyncio.create_task(self._recover(place, circuit), name=f"recover {place}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return circuit

    async def _recover(self, place: Place, circuit: _Circuit) -> None:
        """Probe until it is answered, then close the circuit."""
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            answer = (await self.ask(place)).answer
            if answer is ProbeOutcome.GONE:
                break
            if answer is ProbeOutcome.ANSWERED and loop.time() >= circuit.closes_at:
                break
            await asyncio.sleep(max(pause, circuit.closes_at - loop.time()))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        del self._circuits[place]
        circuit.settled.set()
        self._answered_at[place] = datetime.now(UTC)
        self._on_change(place)
