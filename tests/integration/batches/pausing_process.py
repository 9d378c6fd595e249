"""Processes that work on a batch, and pause before one of their statements."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from app.api.batch_dialects import batch_services
from app.api.container import Services
from app.batches.feed import BatchFeed
from app.core.database import Connection, Database
from app.core.settings import Settings
from app.inference.model_registry import Model
from app.inference.server_pool import ServerPool
from tests.integration.queue.queue_bench import MODEL, Bench

UNLIMITED = 1_000_000  # statements
_LEASE_SECONDS = 60.0


class PausingDatabase(Database):
    """The database of a process that pauses before one of its statements."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(settings, name)
        self.statements_left = UNLIMITED
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        while self.statements_left == 0:
            self.paused.set()
            await self.resumed.wait()
        self.statements_left -= 1
        async with super().connection() as connection:
            yield connection

    def pause_after(self, statements: int) -> None:
        self.statements_left = statements
        self.paused.clear()
        self.resumed.clear()

    def resume(self) -> None:
        self.statements_left = UNLIMITED
        self.resumed.set()


@dataclass(eq=False)
class Process:
    """A process with at most one feed, and the step that it pauses in."""

    services: Services
    database: PausingDatabase
    feed: BatchFeed | None = None
    step: asyncio.Task[bool] | None = None

    async def take(self, batch_id: UUID) -> None:
        """Claim the batch under a new id, as a process that was started again."""
        feeder = uuid4()
        claimed = await self.services.batch_work.claim(feeder, 5, _LEASE_SECONDS)
        if batch_id in [one for one, _ in claimed]:
            self.feed = BatchFeed(batch_services(self.services), feeder, batch_id)
            await self.feed._load()

    async def advance(self, statements: int) -> None:
        """Run a step until it ends, or before the statement after so many."""
        assert self.feed is not None
        self.database.pause_after(statements)
        self.step = asyncio.create_task(self.feed._step())
        pausing = asyncio.create_task(self.database.paused.wait())
        await asyncio.wait({self.step, pausing}, return_when=asyncio.FIRST_COMPLETED)
        pausing.cancel()
        if self.step.done():
            await self.finish()

    async def finish(self) -> None:
        """Go on, until the step has ended."""
        self.database.resume()
        if self.step is not None and not await self.step:
            self.feed = None  # the batch has ended, or another process holds it
        self.step = None

    async def die(self) -> None:
        """Stop; the statement before which it paused may still reach the database."""
        if self.step is not None:
            self.step.cancel()
            self.database.resume()
            await asyncio.wait([self.step])
        self.feed = self.step = None


@contextlib.contextmanager
def open_processes(loop: asyncio.AbstractEventLoop, bench: Bench) -> Iterator[Sequence[Process]]:
    settings = bench.settings.model_copy(update={"batch_in_flight": 2})
    stack = contextlib.AsyncExitStack()

    async def begin() -> Process:
        database = PausingDatabase(settings, "process")
        await stack.enter_async_context(database)
        services = Services(settings, database, ServerPool(database, settings))
        # As if Triton had been seen with it: what is accepted does not depend on Triton.
        services.registry._models = {MODEL: Model(MODEL, 1, True, "", None)}
        return Process(services, database)

    try:
        yield [loop.run_until_complete(begin()) for _ in range(3)]
    finally:
        loop.run_until_complete(stack.aclose())
