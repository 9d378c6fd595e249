"""What the simulation of the service is told about this machine, and the loops that it is held against.

Statements are measured by themselves (`bench.statements`). What a request, a generation and a wake-up
cost beside them is what makes the simulation spend, at two loops, the CPU time that was measured there.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace

import orjson

from bench.cpu import busy_seconds, measure
from bench.load import Load, connect, post
from bench.machine import sync_milliseconds
from bench.report import Options
from bench.servers import MODEL, House, Server
from bench.service_model import (
    API,
    CALLER,
    POSTGRES,
    TRITON,
    WORKER,
    Costs,
    Layout,
    simulate,
)
from bench.statements import READ, Notified, Statement

_WARM_UP_SECONDS = 0.5
_IDLE_SECONDS = 2.0
_MOST_ROUNDS = 3
_MOST_SECONDS = 2.0
_FITTED_SECONDS = 1.0  # simulated
_FITS = 8
_FEW, _MANY = 2, 32  # callers
CHUNKS = 33
_CHUNK_MS = 10

_DAMPING = 0.5
_MOST_WAKING = 0.3  # of a part's time where many call
# What of each part's costs is not measured by itself.
_WORK = {
    API: "request",
    WORKER: "generation",
    TRITON: "triton",
    CALLER: "caller",
    POSTGRES: "digest",
}

ONE_CHUNK = "Say it. {{chunks=1}}"
MANY_CHUNKS = f"Say it. {{{{chunks={CHUNKS} delay_ms={_CHUNK_MS}}}}}"


@dataclass(slots=True, frozen=True)
class Measured:
    """A closed loop as it was: medians over its rounds. CPU time in seconds a result, by part."""

    rate: float
    p50: float  # seconds
    spent: dict[str, float]
    others: float  # cores that other programs used meanwhile


@dataclass(slots=True)
class Loops:
    """Closed loops against one API, and what its processes cost when nothing is asked of them."""

    house: House
    api: Server
    workers: Sequence[Server]
    options: Options
    idle: dict[str, float] = field(default_factory=dict)  # cores, by process tree

    def parts(self) -> dict[str, int]:
        """Process trees."""
        parts = {
            API: self.api.pid,
            POSTGRES: self.house.postgres_pid,
            TRITON: self.house.triton_pid,
        }
        return parts | {f"{WORKER} {place}": one.pid for place, one in enumerate(self.workers)}

    async def rest(self) -> None:
        """See what they do when nothing is asked."""
        sample = await measure(self.parts(), _rest(_IDLE_SECONDS))
        self.idle = {part: seconds / _IDLE_SECONDS for part, seconds in sample.cpu.items()}

    async def measure(
        self,
        callers: int,
        prompt: str = ONE_CHUNK,
        seconds: float = _MOST_SECONDS,
        *,
        warm_up: bool = True,
    ) -> Measured:
        """So many callers with `Prefer: wait`, as in P2; what nobody asked for is left out."""
        body = {"model": MODEL, "content": prompt, "parameters": {"max_tokens": 64}}
        request = post("/results/", orjson.dumps(body), "Prefer: wait=30\r\n")
        seconds = min(self.options.seconds, seconds)
        async with connect(self.api.port, callers) as open_callers:
            if warm_up:
                await open_callers.run(lambda: request, _WARM_UP_SECONDS, (200,))
            taken = [
                await self._take(open_callers.run(lambda: request, seconds, (200,)))
                for _ in range(min(self.options.rounds, _MOST_ROUNDS))
            ]
        loads, spents, others = zip(*taken, strict=True)
        return Measured(
            statistics.median(load.rate for load in loads),
            statistics.median(load.median_milliseconds() for load in loads) / 1000,
            {part: statistics.median(spent[part] for spent in spents) for part in spents[0]},
            max(0.0, statistics.median(others)),
        )

    async def _take(self, work: Awaitable[Load]) -> tuple[Load, dict[str, float], float]:
        """The load, CPU seconds a result by part, and the cores that others used."""
        began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        sample = await measure(self.parts(), work)
        seconds, own = time.perf_counter() - began, time.process_time() - own
        spent = {WORKER: 0.0, CALLER: own / sample.load.count}
        for tree, total in sample.cpu.items():
            part, asked = tree.split()[0], max(0.0, total - self.idle.get(tree, 0.0) * seconds)
            spent[part] = spent.get(part, 0.0) + asked / sample.load.count
        others = (busy_seconds() - busy) / seconds - sum(
            spent.values()
        ) * sample.load.count / seconds
        return sample.load, spent, others


async def _rest(seconds: float) -> Load:
    await asyncio.sleep(seconds)
    return Load()


async def calibrate(
    loops: Loops, statements: dict[str, Statement], notified: Notified
) -> tuple[Costs, dict[str, Measured]]:
    """Costs with which the simulation spends what a few and what many callers cost, worker apart."""
    few, many = await loops.measure(_FEW), await loops.measure(_MANY)
    long = await loops.measure(_MANY, MANY_CHUNKS)
    read = statements[READ]
    hand_over = max(0.0, read.seconds - read.process.of(1) - read.postgres.of(1)) / 2
    # Commits that notify take turns, and none is shorter than a flush: so neither is a flush longer.
    commit = min(sync_milliseconds(loops.house.directory) / 1000, 1 / notified.commits)
    costs = Costs(
        statements=statements,
        notified=notified,
        digest=0.0,
        request=many.spent[API] / 2,
        generation=many.spent[WORKER] / 2,
        chunk=max(0.0, long.spent[WORKER] - many.spent[WORKER]) / (CHUNKS - 1),
        triton=many.spent[TRITON],
        caller=many.spent[CALLER],
        wake=dict.fromkeys(_WORK, 0.0),
        commit=commit,
        turn=max(0.0, 1 / notified.commits - commit),
        hand_over=hand_over,
    )
    for _ in range(_FITS):
        costs = _fit(costs, few, many)
    measured = {f"{_FEW} callers": few, f"{_MANY} callers": many, f"{CHUNKS} chunks": long}
    return costs, measured


def _fit(costs: Costs, few: Measured, many: Measured) -> Costs:
    """A step nearer: for each part two unknowns, what its work costs and what a wake-up does."""
    of_few, of_many = (
        simulate(costs, Layout(callers=callers, workers=1, others=loop.others), _FITTED_SECONDS)
        for callers, loop in ((_FEW, few), (_MANY, many))
    )
    wake, work = dict(costs.wake), {part: getattr(costs, name) for part, name in _WORK.items()}
    for part in _WORK:
        few_lacks = few.spent[part] - of_few.spent[part]
        many_lacks = many.spent[part] - of_many.spent[part]
        wakes = max(0.2, of_few.woken[part] - of_many.woken[part])
        most = _MOST_WAKING * many.spent[part] / max(0.01, of_many.woken[part])
        before = wake[part]
        wake[part] += _DAMPING * (few_lacks - many_lacks) / wakes
        wake[part] = min(most, max(0.0, wake[part]))
        work[part] += many_lacks - (wake[part] - before) * of_many.woken[part]
    return replace(costs, wake=wake, **{name: max(0.0, work[part]) for part, name in _WORK.items()})
