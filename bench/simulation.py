"""A small discrete-event simulation: time that jumps, cores, threads, locks, shared statements.

What happens is written as coroutines that await steps (`await thread.work(0.001)`), in seconds of
simulated time. Nothing here knows the service: `bench.service_model` does.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
Resume = Callable[[], None]
Work = Coroutine["Step", None, None]

SLICE_SECONDS = 0.003  # as Linux shares cores among those who want more than there is


class Step:
    """What a coroutine waits for: `start` is given what to call when it is over."""

    __slots__ = ("start",)

    def __init__(self, start: Callable[[Resume], None]) -> None:
        self.start = start

    def __await__(self) -> Generator["Step", None, None]:
        yield self


class Simulation:
    """The clock, and what is due; what is due at one moment comes in the order it was told."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Resume]] = []
        self._count = itertools.count()

    def after(self, seconds: float, call: Resume) -> None:
        """Call it when so much time has passed."""
        heapq.heappush(self._due, (self.now + seconds, next(self._count), call))

    def sleep(self, seconds: float) -> Step:
        """Time passes and costs nothing."""
        return Step(lambda resume: self.after(seconds, resume))

    def spawn(self, work: Work) -> None:
        """Begin a coroutine, beside all others."""

        def resume() -> None:
            try:
                step = work.send(None)
            except StopIteration:
                return
            step.start(resume)

        self.after(0.0, resume)

    def run(self, until: float) -> None:
        """Let time pass, up to a moment or until nothing is due any more."""
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()


class Cores:
    """So many cores, given to threads in the order of asking; `busy` is seconds of their work."""

    def __init__(self, simulation: Simulation, count: int) -> None:
        self.simulation = simulation
        self.count = count
        self.busy = 0.0
        self._free = count
        self._waiting: deque[Resume] = deque()

    @property
    def is_wanted(self) -> bool:
        """Whether some thread waits for a core."""
        return bool(self._waiting)

    def acquire(self, resume: Resume) -> None:
        """Have one, now or when it is one's turn."""
        if self._free:
            self._free -= 1
            resume()
        else:
            self._waiting.append(resume)

    def release(self) -> None:
        """Leave it to the next one."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1


class Thread:
    """One piece of work at a time, in the order of asking, on a core that others use as well.

    It keeps its core while it has work, but not longer than a slice if others wait. Work that finds it
    asleep takes `wake` seconds more.
    """

    def __init__(self, cores: Cores, wake: float = 0.0) -> None:
        self.busy = 0.0
        self.woken = 0
        self._cores = cores
        self._wake = wake
        self._since = 0.0
        self._waiting: deque[tuple[float, Resume]] = deque()  # the first one is being done

    def work(self, seconds: float) -> Step:
        """Do so much work."""
        return Step(lambda resume: self._ask(seconds, resume))

    def _ask(self, seconds: float, done: Resume) -> None:
        if self._waiting:
            self._waiting.append((seconds, done))
            return
        self.woken += 1
        self._waiting.append((seconds + self._wake, done))
        self._cores.acquire(self._begin_slice)

    def _begin_slice(self) -> None:
        self._since = self._cores.simulation.now
        self._begin()

    def _begin(self) -> None:
        seconds, _ = self._waiting[0]
        self.busy += seconds
        self._cores.busy += seconds
        self._cores.simulation.after(seconds, self._end)

    def _end(self) -> None:
        self._waiting[0][1]()  # what is asked of this thread in there comes while it is awake
        self._waiting.popleft()
        if not self._waiting:
            self._cores.release()
        elif self._cores.is_wanted and self._cores.simulation.now - self._since >= SLICE_SECONDS:
            self._cores.release()
            self._cores.acquire(self._begin_slice)
        else:
            self._begin()


class Lock:
    """One holder at a time; `busy` is how long somebody held it."""

    def __init__(self, simulation: Simulation) -> None:
        self.busy = 0.0
        self._simulation = simulation
        self.is_held = False
        self._since = 0.0
        self._waiting: deque[Resume] = deque()

    def acquire(self) -> Step:
        """Have it, after those who asked before."""
        return Step(self._ask)

    def release(self) -> None:
        """Give it to the next one."""
        self.busy += self._simulation.now - self._since
        self._since = self._simulation.now
        if self._waiting:
            self._simulation.after(0.0, self._waiting.popleft())
        else:
            self.is_held = False

    def _ask(self, resume: Resume) -> None:
        if self.is_held:
            self._waiting.append(resume)
            return
        self.is_held, self._since = True, self._simulation.now
        self._simulation.after(0.0, resume)


class Signal:
    """Set once or many times; who waits goes on at the next setting, or at once if it is set."""

    def __init__(self, simulation: Simulation) -> None:
        self.is_set = False
        self._simulation = simulation
        self._waiting: list[Resume] = []

    def set(self) -> None:
        """Wake all who wait."""
        self.is_set = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            self._simulation.after(0.0, resume)

    def wait(self) -> Step:
        """Wait for it."""

        def start(resume: Resume) -> None:
            if self.is_set:
                self._simulation.after(0.0, resume)
            else:
                self._waiting.append(resume)

        return Step(start)


class Batcher(Generic[T]):
    """As `app.core.group_commit`: one statement at a time, for all that arrived during the last one.

    `statement` is given the items of a batch; who submitted one goes on when it is over.
    """

    def __init__(
        self, simulation: Simulation, statement: Callable[[Sequence[T]], Work], most: int
    ) -> None:
        self.batches = 0
        self.items = 0
        self.busy = 0.0
        self._simulation = simulation
        self._statement = statement
        self._most = most
        self._waiting: deque[tuple[T, Resume]] = deque()
        self._is_running = False

    def submit(self, item: T) -> Step:
        """Be part of the next statement."""
        return Step(lambda resume: self._ask(item, resume))

    def _ask(self, item: T, resume: Resume) -> None:
        self._waiting.append((item, resume))
        if not self._is_running:
            self._is_running = True
            self._simulation.spawn(self._run())

    async def _run(self) -> None:
        while self._waiting:
            count = min(self._most, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            began = self._simulation.now
            await self._statement([item for item, _ in batch])
            self.busy += self._simulation.now - began
            self.batches += 1
            self.items += count
            for _, resume in batch:
                self._simulation.after(0.0, resume)
        self._is_running = False
