"""An executor of attempts, and a queue and a backend of the test."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import cast
from uuid import UUID

from app.core.database import Database
from app.core.ids import new_id
from app.core.settings import Settings
from app.inference.server_pool import DeadEngine
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.job_queue import JobQueue
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Attempt, Backend, OnText, Target
from app.worker.attempt_executor import AttemptExecutor
from app.worker.throughput import Throughput
from tests.unit.worker.test_attempt import Scripted, claim_of

COMPLETED, FAILED = AttemptOutcome.COMPLETED, AttemptOutcome.FAILED
SETTINGS = Settings.model_construct(
    max_streams=10, max_waiters=10, flush_seconds=1e6, database_timeout_seconds=10.0
)


class Batch:
    """A batcher that keeps what is submitted, and whose end takes `seconds`."""

    def __init__(self) -> None:
        self.items: list[object] = []
        self.seconds = 0.0
        self.is_ours = True
        self.is_closed = False

    async def submit(self, item: object) -> bool:
        self.items.append(item)
        await asyncio.sleep(self.seconds)  # in virtual time
        return self.is_ours

    async def close(self) -> None:
        self.is_closed = True


class Elsewhere(set[UUID]):
    """The results that one other process reads."""

    def readers(self, result_id: UUID) -> list[str]:
        return ["a"] if result_id in self else []


class Desk(Backend):
    """An executor with its queue, its backend and its hub."""

    def __init__(self) -> None:
        self.ends, self.chunks = Batch(), Batch()
        self.attempts: dict[UUID, Scripted] = {}
        self.outcomes: list[tuple[Target, AttemptOutcome]] = []
        self.ended: list[Claim] = []
        self.silent: list[Target] = []
        self.dead: set[Target] = set()
        self.probes: list[Target] = []
        self.found_dead: dict[str, dict[str, DeadEngine]] = {}
        self.watched = Elsewhere()
        self.hub = StreamHub(cast(Database, None), cast(ResultStore, None), SETTINGS)
        self.executor = AttemptExecutor(
            new_id(),
            cast(JobQueue, self),
            self,
            self.hub,
            cast(StreamInterest, self.watched),
            Throughput(asyncio.get_running_loop().time),
            SETTINGS,
            self.ended.append,
        )

    # the queue's part

    def end_batcher(self, *_: object) -> Batch:
        return self.ends

    def chunk_batcher(self, *_: object) -> Batch:
        return self.chunks

    # the backend's part

    def ready(self) -> list[str]:
        return ["m", "idle"]

    def free(
        self, _attempts: Collection[Attempt], _exclude: Collection[str] = ()
    ) -> dict[str, int]:
        return {}

    def on_change(self, handler: Callable[[], None]) -> None: ...

    async def close(self) -> None: ...

    def attempt(self, claim: Claim, on_text: OnText) -> Attempt:
        attempt = self.attempts[claim.id] = Scripted(claim, on_text)
        attempt.seconds = 10.0
        attempt.target = ("a:1", claim.model_name)
        return attempt

    def record_outcome(self, target: Target, end: AttemptEnd) -> None:
        self.outcomes.append((target, end.outcome))

    def silent_targets(self, _attempts: Collection[Attempt]) -> list[Target]:
        return self.silent

    async def is_dead(self, target: Target) -> bool:
        self.probes.append(target)
        await asyncio.sleep(5)  # in virtual time
        return target in self.dead

    def dead_engines(self) -> dict[str, dict[str, DeadEngine]]:
        return self.found_dead

    # the test's part

    def start(self, claim: Claim) -> Scripted:
        self.executor.start(claim)
        return self.attempts[claim.id]

    async def until_all_ended(self) -> list[AttemptEnd]:
        while self.executor.tasks:
            await asyncio.wait(self.executor.tasks)
        return cast(list[AttemptEnd], self.ends.items)


def sized(count: int = 100) -> Claim:
    return replace(claim_of(), expected_bytes=count)
