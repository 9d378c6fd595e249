"""A worker before a queue, a database and a backend of the test; `tests/integration/worker` has real ones."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

from app.core.database import Database
from app.core.errors import DatabaseUnavailableError
from app.core.listener import Listener
from app.core.settings import Settings
from app.queue.claim import Claim
from app.queue.job_queue import JobQueue
from app.queue.live_text import Notification
from app.worker.attempt import Attempt
from app.worker.worker import Worker
from tests.unit.worker.desk import Desk
from tests.unit.worker.test_attempt import claim_of
from tests.virtual_time import run_in_virtual_time

POLL = 60.0
SETTINGS = Settings.model_construct(
    max_streams=10,
    max_waiters=10,
    flush_seconds=1e6,
    database_timeout_seconds=10.0,
    lease_seconds=1e9,  # so that heartbeats come on demand alone: leases have the real clock
    poll_seconds=POLL,
    worker_memory_bytes=1_000,
    shutdown_grace_seconds=20.0,
)


class Heart:
    """The connection of heartbeats."""

    def __init__(self) -> None:
        self.beats = 0
        self.declared_dead: set[object] = set()
        self.owned: Callable[[], Collection[UUID]] = tuple

    async def fetchval(self, _sql: str, worker_id: object, *_: object, **_options: object) -> bool:
        self.beats += 1
        return worker_id not in self.declared_dead

    async def fetch(self, *_: object) -> list[object]:
        return [{"id": one, "attempt": 3, "is_cancelled": False} for one in self.owned()]

    def is_closed(self) -> bool:
        return False

    def terminate(self) -> None: ...


class Service(Desk):
    """A worker, its queue, its database and its backend with two slots for model m."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.get_running_loop().time()
        self.dispatcher: Worker | None = None
        self.has_running_limits = False
        self.waiting: list[Claim] = []
        self.suspects: list[Claim] = []
        self.asked: list[tuple[float, dict[str, int]]] = []
        self.asked_suspects: list[float] = []
        self.is_never_empty = False  # the model, of other results
        self.pauses: list[tuple[float, str, str, float]] = []
        self.retired: list[UUID] = []
        self.registered: list[UUID] = []
        self.notified: list[list[Notification]] = []
        self.errors: list[Exception] = []  # of claims
        self.on_claim: list[Callable[[], None]] = []  # called once each
        self.outages = 0
        self.can_retire = True
        self.slots = {"m": 2}
        self.is_closed = False
        self.heart = Heart()
        self.heart.owned = self.running
        self.callbacks: dict[str, list[Callable[[str], None]]] = {}
        self.on_backend_change: Callable[[], None] = lambda: None
        self.worker = Worker(
            cast(Database, self),
            cast(JobQueue, self),
            self,
            cast(Listener, self),
            self.hub,
            SETTINGS,
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    def running(self) -> list[UUID]:
        return [one for one, attempt in self.attempts.items() if not attempt.is_over]

    # --- listener and database

    def subscribe(self, channel: str, callback: Callable[[str], None]) -> None:
        self.callbacks.setdefault(channel, []).append(callback)

    def notify(self, channel: str, payload: str = "") -> None:
        for callback in self.callbacks[channel]:
            callback(payload)

    async def connect(self, _name: str) -> Heart:
        return self.heart

    async def fetch(self, _sql: str, *arguments: Any) -> None:
        if isinstance(arguments[0], UUID):
            self.registered.append(arguments[0])

    # --- queue

    async def load_limits(self) -> None:
        if self.outages:
            self.outages -= 1
            await asyncio.sleep(5)  # in virtual time
            raise DatabaseUnavailableError("away")

    async def claims(
        self, worker_id: UUID, free: Mapping[str, int], room: int
    ) -> AsyncIterator[Sequence[Claim]]:
        assert worker_id == self.worker.worker_id
        self.asked.append((self.now(), dict(free)))
        if self.errors:
            raise self.errors.pop(0)
        if self.on_claim:
            self.on_claim.pop(0)()
        for model, count in free.items():
            found = [one for one in self.waiting if one.model_name == model][:count]
            taken = []
            for one in found:
                if room > 0:
                    taken.append(one)
                    self.waiting.remove(one)
                    room -= one.expected_bytes
            yield taken

    async def suspects_in_turn(self, models: Sequence[str]) -> dict[str, str]:
        assert models
        self.asked_suspects.append(self.now())
        return {one.model_name: one.team_id for one in self.suspects[:1]}

    async def claim_suspects(self, _worker_id: UUID, models: Sequence[str]) -> list[Claim]:
        assert models == ["m"]
        if self.is_never_empty:
            return []
        found, self.suspects = self.suspects[:1], self.suspects[1:]
        return found

    async def pause_suspects(self, model: str, team_id: str, seconds: float) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.pauses.append((self.now(), model, team_id, seconds))

    async def append(
        self, _worker: UUID, _chunks: object, notifications: Sequence[Notification]
    ) -> None:
        self.notified.append(list(notifications))

    async def retire(self, worker_id: UUID) -> None:
        if not self.can_retire:
            raise DatabaseUnavailableError("away")
        self.retired.append(worker_id)

    # --- backend

    def ready(self) -> list[str]:
        return list(self.slots)

    def free(self, attempts: Collection[Attempt], exclude: Collection[str] = ()) -> dict[str, int]:
        free = dict(self.slots)
        for attempt in attempts:
            free[attempt.claim.model_name] -= 1
        return {name: count for name, count in free.items() if count > 0 and name not in exclude}

    def on_change(self, handler: Callable[[], None]) -> None:
        self.on_backend_change = handler

    async def close(self) -> None:
        self.is_closed = True

    # --- the test's part

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.worker.run())
        await asyncio.sleep(1)  # in virtual time
        yield
        self.worker.stop()
        await running

    def add(self, *, size: int = 0, model: str = "m") -> Claim:
        claim = replace(claim_of(), model_name=model, expected_bytes=size)
        self.waiting.append(claim)
        return claim

    def ask_times(self) -> list[float]:
        return [at for at, _ in self.asked]


def run(work: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
    async def in_service() -> None:
        await work(Service())

    run_in_virtual_time(in_service())
