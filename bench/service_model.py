"""The service, simulated: API and worker processes, one PostgreSQL, engines, and a closed loop of callers.

Each piece of work has the cost that was measured for it; what waits for what is as in the code: lanes
without a timer, the claim of what is free, the lock of a commit that notifies, one flush of the log for
all who commit meanwhile, a notification to every process that listens.
"""

import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from bench.simulation import Batcher, Cores, Lock, Signal, Simulation, Thread, Work
from bench.statements import (
    CLAIMED,
    ENDED_ALONE,
    ENDED_AND_TOLD,
    READ,
    STARTED,
    STORED,
    Notified,
    Statement,
)

API, WORKER, POSTGRES, TRITON, CALLER = "api", "worker", "postgres", "triton", "caller"
# As in the service: `job_queue` and `results`.
_MOST = {"_store": 1_000, "_end": 200, "_read": 500}  # rows of a statement
_OTHERS_SECONDS = 0.001  # they work at a time
_START_SECONDS = 0.05
_TAIL_STEP_SECONDS, _TAIL_STEPS = 0.1, 600  # for the answers that are under way
_MODEL_THREADS = 2  # of Triton: the server's, and the model's process


@dataclass(slots=True, frozen=True)
class Costs:
    """Seconds, of CPU time unless stated otherwise."""

    statements: dict[str, Statement]
    notified: Notified
    digest: float  # of PostgreSQL, for each result
    request: float  # of the API: a request and its answer, statements and notifications apart
    generation: float  # of the worker: one stream of one chunk, statements apart
    chunk: float  # of the worker: each further chunk
    triton: float  # of Triton: one stream
    caller: float  # of the load generator: a request
    wake: Mapping[str, float]  # of a thread that slept, by part, beyond its share of the above
    commit: float  # time until the log is on disk
    turn: float  # time with no flush when the lock of notifying commits changes hands
    hand_over: float  # time from one process to another that sleeps


@dataclass(slots=True, frozen=True)
class Layout:
    """The processes and machines. If there are no workers, each API process runs results itself."""

    callers: int
    apis: int = 1
    workers: int = 0
    api_cores: int = 2  # of each host
    apis_of_host: int = 1
    postgres_cores: int = 2
    is_one_host: bool = True  # callers, API, worker, PostgreSQL and Triton share `api_cores`
    others: float = 0.0  # cores of that host which other programs use
    slots: int = 256  # of a process, at all servers together
    has_relay: bool = False  # one listener a host, which notifies all its processes (not built)
    service_seconds: float = 0.0  # of a result, in addition to Triton's CPU time
    chunks: int = 1


@dataclass(slots=True, frozen=True)
class Outcome:
    """Result of a stretch of the loop."""

    rate: float  # results a second
    latencies: Sequence[float]  # seconds
    busy: Mapping[str, float]  # share of the capacity, by resource
    used: Mapping[str, float]  # the same in cores, or as a share of the time
    batches: Mapping[str, float]
    spent: Mapping[str, float]  # seconds of CPU time for each result, by part
    woken: Mapping[str, float]  # wake-ups for each result, by part
    notifying: float  # commits a second

    @property
    def p50(self) -> float:
        return statistics.median(self.latencies)


@dataclass(slots=True, eq=False)
class _Result:
    api: "_Process"
    ended: Signal
    is_told: bool = False  # its caller's process has the row itself


class _Postgres:
    """One server: backends on its cores, the log, the lock of notifying commits, the queue."""

    def __init__(self, simulation: Simulation, cores: Cores, costs: Costs) -> None:
        self.simulation = simulation
        self.cores = cores
        self.queue: deque[_Result] = deque()
        self.listening: list[_Listener] = []
        self.backends: list[Thread] = []
        self.lock = Lock(simulation)
        self.notifying = 0
        self._costs = costs
        self.log: Batcher[None] = Batcher(simulation, self._flush, most=1_000_000)

    def connect(self) -> Thread:
        """A connection: a backend of its own."""
        self.backends.append(Thread(self.cores, self._costs.wake[POSTGRES]))
        return self.backends[-1]

    async def _flush(self, _waiting: Sequence[None]) -> None:
        await self.simulation.sleep(self._costs.commit)

    async def run(self, backend: Thread, kind: str, rows: int, news: "_News") -> None:
        """A statement, from its arrival to the end of its commit."""
        await backend.work(self._costs.statements[kind].postgres.of(rows))
        if kind == READ:
            return
        if not news.waiting and not news.ended:
            await self.log.submit(None)
            return
        is_wanted = self.lock.is_held
        await self.lock.acquire()
        if is_wanted:  # who waited for it is woken up first
            await self.simulation.sleep(self._costs.turn)
        await self.log.submit(None)
        self.lock.release()
        self.queue.extend(news.waiting)
        self.notifying += 1
        for listener in self.listening:
            listener.show(news)


@dataclass(slots=True)
class _News:
    """The notification of a commit: these results wait, or these have ended."""

    waiting: Sequence[_Result] = ()
    ended: Sequence[_Result] = ()


class _Listener:
    """A LISTEN connection, of one process or shared: what comes while it works is fetched together."""

    def __init__(self, process: "_Process", postgres: _Postgres, costs: Costs) -> None:
        self._processes = [process]
        self._costs = costs
        self._backend = postgres.connect()
        self._simulation = postgres.simulation
        self._news: list[_News] = []

    def share(self, process: "_Process") -> None:
        """Notify another process of the host, too."""
        self._processes.append(process)

    def show(self, news: _News) -> None:
        self._news.append(news)
        if len(self._news) == 1:
            self._simulation.spawn(self._fetch())

    async def _fetch(self) -> None:
        await self._simulation.sleep(self._costs.hand_over)
        await self._backend.work(self._costs.notified.postgres)
        news, self._news = self._news, []
        await self._simulation.sleep(self._costs.hand_over)
        first, *others = self._processes
        for process in others:
            self._simulation.spawn(process.fetch(news))
        await first.fetch(news)


class _Process:
    """An API, a worker, or both: one thread, and a connection for each of its lanes."""

    def __init__(
        self,
        world: "_World",
        cores: Cores,
        part: str,
        *,
        has_worker: bool,
        takes_own: bool,
    ) -> None:
        self.thread = Thread(cores, world.costs.wake[part])
        self.has_worker = has_worker
        self._takes_own = takes_own  # what is stored here may be run here at once
        self._world = world
        self._simulation = world.simulation
        self._costs = world.costs
        self._postgres = world.postgres
        self._running = 0
        self._is_short = True
        self._wake = Signal(world.simulation)
        self._asking = world.postgres.connect()
        self.stores = self._lane(self._store)
        self.ends = self._lane(self._end)
        self.reads = self._lane(self._read)
        if has_worker:
            world.simulation.spawn(self._claim())

    def _lane(self, statement: Callable[[Thread, Sequence[_Result]], Work]) -> Batcher[_Result]:
        backend = self._postgres.connect()
        most = _MOST[statement.__name__]
        return Batcher(self._simulation, lambda items: statement(backend, items), most)

    async def _ask(
        self,
        backend: Thread,
        kind: str,
        find: Callable[[], Sequence[_Result]],
        news: _News | None = None,
    ) -> Sequence[_Result]:
        """A statement for what is found when it gets there; that."""
        cost = self._costs.statements[kind].process
        await self.thread.work(cost.each / 2)
        await self._simulation.sleep(self._costs.hand_over)
        found = find()
        await self._postgres.run(backend, kind, len(found), news or _News())
        await self._simulation.sleep(self._costs.hand_over)
        await self.thread.work(cost.each / 2 + cost.row * len(found))
        return found

    # --- the API's side -----------------------------------------------------------------------------

    async def serve(self, result: _Result) -> None:
        """A request with `Prefer: wait`, from its first byte to the last of its answer."""
        await self.thread.work(self._costs.request / 2)
        await self.stores.submit(result)
        await result.ended.wait()
        if not result.is_told:
            await self.reads.submit(result)
        await self.thread.work(self._costs.request / 2)

    async def _store(self, backend: Thread, results: Sequence[_Result]) -> None:
        free = self._world.layout.slots - self._running
        may_start = self._takes_own and not self._is_short and not self._postgres.queue
        started = results[:free] if may_start else []
        self._running += len(started)
        for result in started:
            self._simulation.spawn(self._generate(result))
        news = _News(waiting=results[len(started) :])
        await self._ask(backend, STARTED if started else STORED, lambda: results, news)

    async def _read(self, backend: Thread, results: Sequence[_Result]) -> None:
        await self._ask(backend, READ, lambda: results)

    async def fetch(self, news: Sequence[_News]) -> None:
        """Read notifications, except those of channels that this process does not listen to."""
        heard = [one for one in news if one.ended or self.has_worker]
        if heard:
            cost = self._costs.notified.process
            await self.thread.work(sum(cost.of(len(one.ended)) for one in heard))
        for one in heard:
            self._hear(one)

    def _hear(self, news: _News) -> None:
        if not news.ended:
            self._wake.set()
        for result in news.ended:
            if result.api is self:
                result.ended.set()

    # --- the worker's side --------------------------------------------------------------------------

    async def _claim(self) -> None:
        while True:
            is_empty = False
            while not is_empty and (free := self._world.layout.slots - self._running) > 0:
                taken = await self._ask(self._asking, CLAIMED, lambda: self._pick(free))
                for result in taken:
                    self._simulation.spawn(self._generate(result))
                is_empty = len(taken) < free
            self._is_short = not is_empty
            await self._wake.wait()
            self._wake.is_set = False

    def _pick(self, most: int) -> Sequence[_Result]:
        queue = self._postgres.queue
        taken = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._running += len(taken)
        return taken

    async def _generate(self, result: _Result) -> None:
        costs, layout = self._costs, self._world.layout
        await self.thread.work(costs.generation / 2)
        await self._world.generate()
        await self.thread.work(costs.generation / 2 + costs.chunk * (layout.chunks - 1))
        await self.ends.submit(result)
        self._running -= 1
        if self._is_short:
            self._wake.set()

    async def _end(self, backend: Thread, results: Sequence[_Result]) -> None:
        own = [result for result in results if result.api is self]
        kind = ENDED_AND_TOLD if own else ENDED_ALONE
        for result in own:
            result.is_told = True
        await self._ask(backend, kind, lambda: results, _News(ended=results))
        self._world.digest(len(results))
        for result in own:
            result.ended.set()


async def _work(thread: Thread, seconds: float) -> None:
    await thread.work(seconds)


class _World:
    """All of it, for one layout."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        self.simulation = simulation = Simulation()
        first = Cores(simulation, layout.api_cores)
        self.postgres_cores = (
            first if layout.is_one_host else Cores(simulation, layout.postgres_cores)
        )
        self.postgres = _Postgres(simulation, self.postgres_cores, costs)
        self._behind = self.postgres.connect()
        self._caller = Thread(first, costs.wake[CALLER]) if layout.is_one_host else None
        self.triton_threads = [
            Thread(first, costs.wake[TRITON]) for _ in range(_MODEL_THREADS * layout.is_one_host)
        ]
        self._triton = cycle(self.triton_threads)
        self.hosts = [first]
        self.apis = self._processes(first, layout.apis, layout.apis_of_host, is_api=True)
        self.workers = self._processes(first, layout.workers, 1, is_api=False)
        self.latencies: list[float] = []
        self.calling = layout.callers
        for number in range(layout.api_cores if layout.others else 0):
            simulation.spawn(self._disturb(Thread(first), number))

    async def _disturb(self, thread: Thread, seed: int) -> None:
        """Be one of the other programs: its work comes whether it gets a core or not."""
        dice, rate = random.Random(seed), self.layout.others / self.layout.api_cores
        while True:
            self.simulation.spawn(_work(thread, dice.expovariate(1 / _OTHERS_SECONDS)))
            await self.simulation.sleep(dice.expovariate(rate / _OTHERS_SECONDS))

    def _processes(self, first: Cores, count: int, of_host: int, *, is_api: bool) -> list[_Process]:
        is_both = is_api and self.layout.workers == 0
        cores = first
        made = []
        for number in range(count):
            if not self.layout.is_one_host and number % of_host == 0 and (number or not is_api):
                cores = Cores(self.simulation, self.layout.api_cores)
                self.hosts.append(cores)
            part, has_worker = API if is_api else WORKER, is_both or not is_api
            process = _Process(self, cores, part, has_worker=has_worker, takes_own=is_both)
            if number % of_host == 0 or not self.layout.has_relay:
                hearing = _Listener(process, self.postgres, self.costs)
                self.postgres.listening.append(hearing)
            else:
                self.postgres.listening[-1].share(process)
            made.append(process)
        return made

    async def generate(self) -> None:
        """The engine's part of a result."""
        await self.simulation.sleep(self.costs.hand_over)
        if self.triton_threads:
            await next(self._triton).work(self.costs.triton)
        await self.simulation.sleep(self.layout.service_seconds + self.costs.hand_over)

    def digest(self, rows: int) -> None:
        """PostgreSQL's work for ended results, for which no caller waits."""

        async def work() -> None:
            await self._behind.work(self.costs.digest * rows)

        self.simulation.spawn(work())

    async def call(self, api: _Process, pause: float, ends: float) -> None:
        """A caller: after a pause a request after the other, until the time is over."""
        await self.simulation.sleep(pause)
        while self.simulation.now < ends:
            began = self.simulation.now
            if self._caller is not None:
                await self._caller.work(self.costs.caller)
                await self.simulation.sleep(self.costs.hand_over)
            result = _Result(api, Signal(self.simulation))
            await api.serve(result)
            await self.simulation.sleep(self.costs.hand_over)
            self.latencies.append(self.simulation.now - began)
        self.calling -= 1

    def busy(self) -> dict[str, tuple[float, int]]:
        """Seconds that were worked so far, and by how many at once; of each kind, the busiest."""
        processes = [*self.apis, *self.workers]
        found = {
            "cores": max((host.busy, host.count) for host in self.hosts),
            "one process": (max(process.thread.busy for process in processes), 1),
            "PostgreSQL's cores": (self.postgres_cores.busy, self.postgres_cores.count),
            "lock of notifying commits": (self.postgres.lock.busy, 1),
            "log": (self.postgres.log.busy, 1),
        }
        if self.layout.is_one_host:
            del found["PostgreSQL's cores"]
        return found

    def threads(self) -> dict[str, Sequence[Thread]]:
        """All there are, by part."""
        return {
            API: [one.thread for one in self.apis],
            WORKER: [one.thread for one in self.workers],
            POSTGRES: self.postgres.backends,
            TRITON: self.triton_threads,
            CALLER: [self._caller] if self._caller else [],
        }

    def spent(self) -> dict[str, tuple[float, int]]:
        """Seconds of CPU time so far, and wake-ups, by part."""
        return {
            part: (sum(one.busy for one in threads), sum(one.woken for one in threads))
            for part, threads in self.threads().items()
        }

    def batches(self) -> dict[str, float]:
        """Mean rows of a statement."""
        lanes = {
            "stored": [api.stores for api in self.apis],
            "ended": [one.ends for one in self.workers or self.apis],
        }
        return {
            name: sum(lane.items for lane in found) / max(1, sum(lane.batches for lane in found))
            for name, found in lanes.items()
        }


def simulate(costs: Costs, layout: Layout, seconds: float, warm_up: float = 0.0) -> Outcome:
    """Run the loop so long, after a warm-up. Answers that come later count for latencies alone."""
    world = _World(costs, layout)
    simulation = world.simulation
    simulation.run(_START_SECONDS)  # claims find nothing
    begins = _START_SECONDS + warm_up
    for number in range(layout.callers):
        api = world.apis[number % len(world.apis)]
        # Elsewhere than in a measured loop they begin one after the other, as strangers do.
        pause = 0.0 if layout.is_one_host else warm_up / 2 * number / layout.callers
        simulation.spawn(world.call(api, pause, begins + seconds))
    simulation.run(begins)
    world.latencies.clear()
    before, spent_before, notifying = world.busy(), world.spent(), world.postgres.notifying
    simulation.run(begins + seconds)
    after, notifying = world.busy(), world.postgres.notifying - notifying
    in_time = len(world.latencies)
    batches = world.batches()
    spent, woken = (
        {
            part: (now[place] - spent_before[part][place]) / max(1, in_time)
            for part, now in world.spent().items()
        }
        for place in (0, 1)
    )
    for step in range(1, _TAIL_STEPS):
        if world.calling:
            simulation.run(begins + seconds + step * _TAIL_STEP_SECONDS)
    busy = {
        name: ((worked - before[name][0]) / seconds, count)
        for name, (worked, count) in after.items()
    }
    return Outcome(
        in_time / seconds,
        world.latencies,
        {name: used / count for name, (used, count) in busy.items()},
        {name: used for name, (used, _) in busy.items()},
        batches,
        spent,
        woken,
        notifying / seconds,
    )
