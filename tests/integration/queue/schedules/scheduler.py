"""Schedules of two processes: each statement and each commit of either runs when its turn comes.

The connections are real ones of a real PostgreSQL; they only pause. A statement that runs outside a
transaction pauses again before its commit, as if the commit were slow. A statement that waits for a
lock of the other side is found by `pg_blocking_pids`; then the other side goes on. A gate, a third
connection that holds a lock until both sides wait, stops them in the midst of a statement.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

from app.batches.files import FileStore
from app.batches.store import BatchStore
from app.batches.work import BatchWork
from app.core.database import Connection, Database
from app.core.settings import Settings
from app.core.waiting import is_set_within
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd
from app.queue.idempotency import IdempotencyKeys
from app.queue.job_queue import JobQueue
from app.results.contexts import ContextStore
from app.results.retention.erasure import Erasure
from app.results.store import ResultStore
from app.webhooks.outbox import WebhookOutbox
from tests.claims import claim_all
from tests.integration.queue.queue_bench import MODEL

T = TypeVar("T")
Work = Callable[["Process"], Awaitable[Any]]

_LOOK_SECONDS = 0.004  # between two looks for a lock that a running statement waits for
_STUCK_SECONDS = 60.0


@dataclass(eq=False)
class Side:
    """One of the two processes."""

    name: str
    changed: asyncio.Event  # shared with the other side
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    is_at_gate: bool = False
    is_done: bool = False
    next_step: str = ""

    async def wait_for_turn(self, step: str) -> None:
        self.next_step, self.is_at_gate = step, True
        self.changed.set()
        await self.turn.wait()
        self.turn.clear()

    def go(self) -> None:
        self.is_at_gate = False
        self.turn.set()

    @property
    def is_running(self) -> bool:
        return not self.is_at_gate and not self.is_done


class SteppedConnection(asyncpg.Connection):
    """A connection that waits for a turn before each statement and before each commit."""

    side: Side | None = None  # None: it does not wait

    async def fetch(self, query: str, *arguments: Any, **options: Any) -> Any:
        return await self._step(query, partial(super().fetch, query, *arguments, **options))

    async def fetchrow(self, query: str, *arguments: Any, **options: Any) -> Any:
        return await self._step(query, partial(super().fetchrow, query, *arguments, **options))

    async def fetchval(self, query: str, *arguments: Any, **options: Any) -> Any:
        return await self._step(query, partial(super().fetchval, query, *arguments, **options))

    async def execute(self, query: str, *arguments: Any, **options: Any) -> Any:
        run = partial(super().execute, query, *arguments, **options)
        if query.startswith(("BEGIN", "ROLLBACK")):
            return await run()
        return await self._step(query, run)

    async def _step(self, query: str, run: Callable[[], Awaitable[T]]) -> T:
        if self.side is None:
            return await run()
        await self.side.wait_for_turn(query)
        # A read pauses no second time: its transaction holds no lock.
        if self.is_in_transaction() or query.lstrip().startswith("SELECT"):
            return await run()
        await super().execute("BEGIN")
        try:
            answer = await run()
        except BaseException:
            await super().execute("ROLLBACK")
            raise
        await self.side.wait_for_turn("COMMIT;")
        await super().execute("COMMIT")
        return answer


class SteppedDatabase(Database):
    """A process's database whose only connection is a stepped one."""

    def __init__(self, settings: Settings, connection: SteppedConnection) -> None:
        super().__init__(settings, "stepped")
        self.stepped = connection
        self.deadlocks = 0
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with self._lock:
            try:
                yield self.stepped
            except asyncpg.DeadlockDetectedError:
                self.deadlocks += 1
                raise


class Process:
    """The parts of one process of the service."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.database = database
        self.settings = settings
        self.queue = JobQueue(database, settings)
        self.results = ResultStore(database, self.queue, settings)
        self.contexts = ContextStore(database, self.queue, settings)
        self.keys = IdempotencyKeys(database, settings)
        self.erasure = Erasure(database)
        self.outbox = WebhookOutbox(database, settings)
        self.batches = BatchStore(database, max_open=1)
        self.lines = BatchWork(database)
        self.files = FileStore(database, max_bytes=10)

    async def claim(self, worker: UUID, count: int = 100) -> list[Claim]:
        return await claim_all(self.queue, worker, {MODEL: count})

    async def end(self, worker: UUID, *ends: AttemptEnd) -> list[bool]:
        return list(await self.queue.end_batcher(worker, 5.0).submit_all(ends))


class Choices:
    """Chooses the order of turns at random, never one that it has chosen before."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - repeatable
        self._bias = 0.5
        self._root = _Node()
        self._path: list[tuple[_Node, int]] = []
        self._node = self._root

    @property
    def is_exhausted(self) -> bool:
        return self._root.is_exhausted

    def begin(self) -> None:
        self._node, self._path = self._root, []
        # The later steps of a long work are met only by schedules that favour it.
        self._bias = self._random.choice((0.2, 0.5, 0.8))

    def choose(self, count: int) -> int:
        node = self._node
        node.children += [_Node() for _ in range(count - len(node.children))]
        fresh = [place for place in range(count) if not node.children[place].is_exhausted]
        # None is fresh if the same turns led to another state, as after a deadlock.
        fresh = fresh or list(range(count))
        chosen = fresh[0] if self._random.random() < self._bias else fresh[-1]
        self._path.append((node, chosen))
        self._node = node.children[chosen]
        return chosen

    def end(self) -> None:
        self._node.is_exhausted = True
        for node, _ in reversed(self._path):
            node.is_exhausted = all(child.is_exhausted for child in node.children)


@dataclass(eq=False)
class _Node:
    children: "list[_Node]" = field(default_factory=list)
    is_exhausted: bool = False


@dataclass
class Schedule:
    """One run of two works, in an order of turns."""

    settings: Settings
    connections: Sequence[SteppedConnection]
    observer: asyncpg.Connection  # sees which statement waits for which lock
    gate: asyncpg.Connection
    choices: Choices
    steps: list[str] = field(default_factory=list)  # that were run, for the report of a failure
    deadlocks: int = 0

    async def close_gate(self, statement: str, *arguments: object) -> None:
        """Hold locks until both sides wait: two statements then meet in their midst."""
        await self.gate.execute("BEGIN")
        await self.gate.execute(statement, *arguments)

    async def run(self, left: Work, right: Work) -> tuple[Any, Any]:
        """Run both to their ends; their answers, or the exceptions that they raised."""
        changed = asyncio.Event()
        sides = [Side("left", changed), Side("right", changed)]
        databases = [SteppedDatabase(self.settings, one) for one in self.connections]
        tasks = []
        for side, database, work in zip(sides, databases, (left, right), strict=True):
            database.stepped.side = side
            tasks.append(asyncio.create_task(_run(side, work, Process(database, self.settings))))
        try:
            async with asyncio.timeout(_STUCK_SECONDS):
                await self._take_turns(sides)
        finally:
            for task in tasks:
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            await self._open_gate()
            for connection in self.connections:
                connection.side = None
        self.deadlocks = sum(database.deadlocks for database in databases)
        return answers[0], answers[1]

    async def _take_turns(self, sides: Sequence[Side]) -> None:
        while True:
            for side in sides:
                await self._settle(side)
            ready = [side for side in sides if side.is_at_gate]
            if ready:
                side = ready[self.choices.choose(len(ready)) if len(ready) > 1 else 0]
                self.steps.append(f"{side.name}: {' '.join(side.next_step.split())[:90]}")
                side.go()
            elif all(side.is_done for side in sides):
                return
            elif self.gate.is_in_transaction():
                await self._open_gate()
            else:  # a deadlock, until PostgreSQL ends it
                await is_set_within(sides[0].changed, _LOOK_SECONDS)

    async def _open_gate(self) -> None:
        if self.gate.is_in_transaction():
            self.steps.append("the gate opens")
            await self.gate.execute("ROLLBACK")

    async def _settle(self, side: Side) -> None:
        """Wait until a side is at its next step, has ended, or waits for a lock of another."""
        while side.is_running:
            side.changed.clear()
            if await is_set_within(side.changed, _LOOK_SECONDS):
                continue
            (own,) = [one.get_server_pid() for one in self.connections if one.side is side]
            others = {one.get_server_pid() for one in (*self.connections, self.gate)} - {own}
            if others & {*await self.observer.fetchval("SELECT pg_blocking_pids($1)", own)}:
                if not self.steps[-1].endswith("waits"):
                    self.steps.append(f"{side.name} waits")
                return


async def _run(side: Side, work: Work, process: Process) -> Any:
    try:
        return await work(process)
    finally:
        side.is_done = True
        side.changed.set()
