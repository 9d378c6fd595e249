"""Shares of a process by team: turns of its event loop, and connections to the database.

An event loop runs all tasks that are ready before it looks for others. A thousand ready tasks of one team
would delay each step of every other request by their whole time. Here the tasks of a team run for
`_TURN_SECONDS` in one round of the loop, and further ones wait in their order for the next rounds. (Round
robin with a quantum, as in deficit round robin: Shreedhar and Varghese 1995.)
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

_Item = TypeVar("_Item")

_TURN_SECONDS = 0.0005
_REMEMBERED = 8  # steps that a mean time is made of
_SHORTEST_STEP, _COMMON_STEP = 1e-5, 1e-4  # seconds


class FairShares:
    """The shares of the teams that have requests in this process."""

    def __init__(self, connections: int, turn_seconds: float = _TURN_SECONDS) -> None:
        """`connections`: those of the pool, of which a team may have half."""
        self.turn_seconds = turn_seconds
        self.connections = max(1, connections // 2)
        self.loop = asyncio.get_running_loop()
        self._teams: WeakValueDictionary[str, TeamShare] = WeakValueDictionary()
        self._in_round: list[TeamShare] = []
        self.loop.set_task_factory(_new_task)  # type: ignore[arg-type]

    def close(self) -> None:
        self.loop.set_task_factory(None)

    async def run(self, team_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; its steps, and those of all tasks that it starts, take the team's turns."""
        team = self.of(team_id)
        token = _SHARE.set(team)
        try:
            await _InTurns(team, work)
        finally:
            _SHARE.reset(token)

    def of(self, team_id: str) -> "TeamShare":
        team = self._teams.get(team_id)
        if team is None:
            team = self._teams[team_id] = TeamShare(self)
        return team

    def enter_round(self, team: "TeamShare") -> None:
        if not self._in_round:
            self.loop.call_soon(self._end_round)
        self._in_round.append(team)

    def _end_round(self) -> None:
        teams, self._in_round = self._in_round, []
        for team in teams:
            team.begin_round()


class TeamShare:
    """A team's turns of the event loop and its connections to the database."""

    def __init__(self, shares: FairShares) -> None:
        self.shares = shares
        self._connections = asyncio.Semaphore(shares.connections)
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a turn
        self._spent = 0.0  # seconds in this round, without the present step
        self._step_began = 0.0
        self._mean_step = _COMMON_STEP
        self._is_in_round = False

    def has_turn(self, *, is_next: bool = False) -> bool:
        """Return whether a step may run: others wait first unless it is the next."""
        return self._spent < self.shares.turn_seconds and (is_next or not self._waiting)

    def is_over(self) -> bool:
        """True if the present step has used what was left of the turn."""
        spent = self._spent + time.perf_counter() - self._step_began
        return spent >= self.shares.turn_seconds

    def wait(self, *, is_next: bool = False) -> asyncio.Future[None]:
        """A future of the next turn: behind those that wait, unless this step is the next."""
        turn = self.shares.loop.create_future()
        if is_next:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        self._enter_round()
        return turn

    def begin_step(self) -> None:
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        seconds = time.perf_counter() - self._step_began
        self._spent += seconds
        self._mean_step += (seconds - self._mean_step) / _REMEMBERED
        self._enter_round()

    def begin_round(self) -> None:
        """Admit as many waiting steps as fit into a turn, by their mean time."""
        self._is_in_round = False
        self._spent = 0.0
        if not self._waiting:
            return
        self._enter_round()
        steps = self.shares.turn_seconds / max(self._mean_step, _SHORTEST_STEP)
        for _ in range(min(max(1, int(steps)), len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)

    def _enter_round(self) -> None:
        if not self._is_in_round:
            self._is_in_round = True
            self.shares.enter_round(self)

    @asynccontextmanager
    async def connection(self, seconds: float) -> AsyncIterator[None]:
        """Hold one of the team's connections, without waits for turns. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            await self._connections.acquire()
        try:
            with _without_turns():
                yield
        finally:
            self._connections.release()


class _InTurns(Coroutine[Any, Any, Any]):
    """A coroutine that waits for its team's turn before each step."""

    __slots__ = ("_coroutine", "_error", "_is_next", "_team")

    def __init__(self, team: TeamShare, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._team = team
        self._coroutine = coroutine
        self._is_next = False  # it was admitted to this round
        self._error: Exception | None = None  # that its next step begins with

    def send(self, value: Any) -> Any:
        if self._must_wait():
            return self._wait()
        error, self._error = self._error, None
        if error is not None:
            return self._step(self._coroutine.throw, error)
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """A cancellation runs at once; an error that was awaited waits for its turn."""
        if isinstance(error[0], Exception) and self._must_wait():
            self._error = error[0]
            return self._wait()
        self._error = None
        return self._step(self._coroutine.throw, *error)

    def _must_wait(self) -> bool:
        if self._team.has_turn(is_next=self._is_next):
            return False
        # With the loop given, none is looked up: that is a system call in Python 3.11.
        return asyncio.current_task(self._team.shares.loop) not in _WITHOUT_TURNS

    def _wait(self) -> asyncio.Future[None]:
        turn = self._team.wait(is_next=self._is_next)
        self._is_next = True
        turn._asyncio_future_blocking = True  # as `Future.__await__` does
        return turn

    def _step(self, resume: Callable[..., Any], *value: Any) -> Any:
        self._is_next = False
        self._team.begin_step()
        try:
            return resume(*value)
        finally:
            del value  # the traceback of an error holds this frame: a cycle, left to a collection
            self._team.end_step()

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> "_InTurns":
        return self

    def __iter__(self) -> "_InTurns":
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # its state, for `inspect`


# Tasks outside of requests have none.
_SHARE: ContextVar[TeamShare | None] = ContextVar("llm_share", default=None)
# Tasks that hold what other teams may wait for.
_WITHOUT_TURNS: set[asyncio.Task[Any] | None] = set()


def move_to(team_id: str) -> None:
    """Have the tasks that the present request starts from now on take this team's turns."""
    if (team := _SHARE.get()) is not None:
        _SHARE.set(team.shares.of(team_id))


async def pause() -> None:
    """Let other teams run if the present step has used up the turn of its team."""
    if (team := _SHARE.get()) is not None and team.is_over():
        await asyncio.sleep(0)


async def in_turns(items: Iterable[_Item]) -> AsyncIterator[_Item]:
    """Yield each item, and let other teams run between two of them where the turn is used up."""
    for item in items:
        yield item
        await pause()


@asynccontextmanager
async def connection_of_team(seconds: float) -> AsyncIterator[None]:
    """Hold one of the connections of the present request's team. Raises TimeoutError."""
    team = _SHARE.get()
    if team is None or asyncio.current_task() in _WITHOUT_TURNS:
        yield
    else:
        async with team.connection(seconds):
            yield


@asynccontextmanager
async def shared_lock(lock: asyncio.Lock) -> AsyncIterator[None]:
    """Hold a lock for which requests of all teams wait, without waits for turns."""
    with _without_turns():
        async with lock:
            yield


@contextmanager
def _without_turns() -> Iterator[None]:
    task = asyncio.current_task()
    if task in _WITHOUT_TURNS:
        yield
        return
    _WITHOUT_TURNS.add(task)
    try:
        yield
    finally:
        _WITHOUT_TURNS.discard(task)


def _new_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    team = _SHARE.get() if options.get("context") is None else None
    # A connection is returned to its pool by a task of its holder.
    if team is not None and asyncio.current_task(loop) not in _WITHOUT_TURNS:
        coroutine = _InTurns(team, coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)
