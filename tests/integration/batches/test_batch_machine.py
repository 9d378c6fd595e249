"""A batch over two processes that pause in the midst of a step, come back late, or die.

Each line reaches one end, in one file, and the counts add up. `FUZZ` is explained in
`tests/machines.py`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID, uuid4

import orjson
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from app.api.container import Services
from app.api.openai.batches_router import batch_services
from app.batches import feed as feed_module
from app.batches.feed import BatchFeed
from app.batches.files import FileDetails
from app.batches.rows import Batch, NewBatch
from app.core.database import Connection, Database
from app.core.errors import ConflictError, NotFoundError
from app.core.ids import new_id
from app.core.settings import Settings
from app.inference.model_registry import Model
from app.inference.server_pool import ServerPool
from app.queue.finish import AttemptOutcome
from tests.integration.queue.queue_bench import MODEL, REFUSED, Bench, ended
from tests.machines import DatabaseMachine, check_machine, loop_and_bench
from tests.postgres import PostgresServer

LEASE = 60.0
UNLIMITED = 1_000_000
ENDS = ("completed", "failed", "expired", "cancelled")
# The members of a line's request: one result, two, and a request that is refused.
LINES = ({"max_tokens": 4}, {"max_tokens": 4, "n": 2}, {"max_tokens": 0})


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
        if batch_id in await self.services.batch_work.claim(feeder, 5, LEASE):
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
        assert self.step is not None
        if not await self.step:
            self.feed = None  # the batch has ended, or another process holds it
        self.step = None

    async def die(self) -> None:
        """Stop; the statement before which it paused may still reach the database."""
        if self.step is not None:
            self.step.cancel()
            self.database.resume()
            await asyncio.wait([self.step])
        self.feed = self.step = None


class BatchMachine(DatabaseMachine):
    processes: ClassVar[Sequence[Process]]

    @initialize(kinds=st.lists(st.sampled_from(LINES), min_size=1, max_size=4))
    def begin(self, kinds: list[dict[str, int]]) -> None:
        self.team = f"team-{uuid4()}"
        self.sizes = [kind.get("n", 1) for kind in kinds]
        self.is_cancelled = self.is_expired = self.is_deleted = False
        self.worker = self.run(self.bench.worker())
        self.batch_id = self.run(self._create(kinds))

    @rule(place=st.integers(0, 1))
    def take(self, place: int) -> None:
        if self.processes[place].feed is None:
            self.run(self.processes[place].take(self.batch_id))

    @rule(place=st.integers(0, 1), statements=st.integers(1, 14) | st.just(UNLIMITED))
    def step(self, place: int, statements: int) -> None:
        process = self.processes[place]
        if process.step is not None:
            self.run(process.finish())
        elif process.feed is not None:
            self.run(process.advance(statements))

    @rule(place=st.integers(0, 1))
    def die(self, place: int) -> None:
        self.run(self.processes[place].die())

    @rule()
    def lease_runs_out(self) -> None:
        self._update("lease_expires_at = now()")

    @rule(
        count=st.integers(1, 3),
        outcome=st.sampled_from([AttemptOutcome.COMPLETED, AttemptOutcome.FAILED]),
    )
    def run_results(self, count: int, outcome: AttemptOutcome) -> None:
        self.run(self._run_results(count, outcome))

    @rule()
    def notify(self) -> None:
        for process in self.processes:
            if process.feed is not None:
                process.feed.on_ended(None)

    @rule()
    def cancel(self) -> None:
        try:
            self.run(self.processes[0].services.batches.cancel(self.team, self.batch_id))
        except ConflictError:
            return
        self.is_cancelled = True

    @rule()
    def expire(self) -> None:
        self.is_expired = True
        self._update("expires_at = now()")

    @rule()
    def delete_a_result(self) -> None:
        ids = self.run(
            self.bench.database.fetch("SELECT id FROM results WHERE team_id = $1", self.team)
        )
        if ids:
            self.is_deleted = True
            with contextlib.suppress(NotFoundError):
                results = self.processes[0].services.results
                self.run(results.delete(self.team, ids[0]["id"], force=True))

    @invariant()
    def counts_add_up(self) -> None:
        if hasattr(self, "batch_id"):
            self.run(self._check_counts())

    def teardown(self) -> None:
        if hasattr(self, "batch_id"):
            self.run(self._drain())

    # --- what the rules do --------------------------------------------------------------------------

    async def _create(self, kinds: Sequence[dict[str, int]]) -> UUID:
        services = self.processes[0].services
        writer = services.files.writer(self.team)
        for number, kind in enumerate(kinds):
            body = {"model": MODEL, "prompt": "a", **kind}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            await writer.write(orjson.dumps(line | {"body": body}) + b"\n")
        file = await services.files.finish(self.team, writer, FileDetails("batch", "in.jsonl"))
        new = NewBatch(new_id(), self.team, "/v1/completions", file.id, "24h", "{}", 3600.0, None)
        batch, _ = await services.batches.create(new)
        return batch.id

    def _update(self, change: str) -> None:
        statement = f"UPDATE batches SET {change} WHERE id = $1"
        self.run(self.bench.connection.execute(statement, self.batch_id))

    async def _run_results(self, count: int, outcome: AttemptOutcome) -> None:
        claims = await self.bench.claim(self.worker, count)
        failure = None if outcome is AttemptOutcome.COMPLETED else REFUSED
        if claims:
            await self.bench.end(
                self.worker, *(ended(claim, outcome, failure=failure) for claim in claims)
            )

    async def _batch(self) -> Batch:
        return await self.processes[0].services.batches.get(self.team, self.batch_id)

    async def _check_counts(self) -> None:
        connection = self.bench.connection
        batch = await connection.fetchrow(
            """SELECT b.*, count(*) FILTER (WHERE l.is_completed) AS good,
                 count(*) FILTER (WHERE NOT l.is_completed) AS bad
               FROM batches b LEFT JOIN batch_lines l ON l.batch_id = b.id
               WHERE b.id = $1 GROUP BY b.id""",
            self.batch_id,
        )
        assert batch is not None
        if batch["ended_at"] is None:
            assert (batch["completed"], batch["failed"]) == (batch["good"], batch["bad"])
        results = await connection.fetchval(
            "SELECT count(*) FROM results WHERE team_id = $1", self.team
        )
        assert results <= sum(self.sizes), "a line was sent twice"

    async def _drain(self) -> None:
        """Let every process go on, and a last one bring the batch to its end."""
        for process in self.processes:
            if process.step is not None:
                await process.finish()
            await process.die()
        last = self.processes[0]
        async with asyncio.timeout(60):
            while (await self._batch()).state not in ENDS:
                await self.bench.connection.execute("UPDATE batches SET lease_expires_at = now()")
                await last.take(self.batch_id)
                while last.feed is not None:
                    await self._run_results(9, AttemptOutcome.COMPLETED)
                    last.feed.on_ended(None)
                    await last.advance(UNLIMITED)
        await self._check_end()

    async def _check_end(self) -> None:
        batch = await self._batch()
        assert (batch.state == "cancelled") == self.is_cancelled
        assert batch.state == "completed" or self.is_cancelled or self.is_expired
        lines = [await self._lines(batch.output_file_id), await self._lines(batch.error_file_id)]
        assert [batch.completed, batch.failed] == [len(one) for one in lines]
        ids = sorted(line["custom_id"] for one in lines for line in one)
        if batch.in_progress_at is not None:
            assert batch.total == len(self.sizes)
            assert ids == [f"c{number}" for number in range(batch.total)]
        else:  # stopped before its lines were stored
            assert (batch.total, ids) == (0, [])
        assert all(line["response"]["status_code"] == 200 for line in lines[0])
        connection = self.bench.connection
        pending = await connection.fetch(
            "SELECT FROM results WHERE team_id = $1 AND state = 'pending'", self.team
        )
        assert pending == []

    async def _lines(self, file_id: UUID | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        files = self.processes[0].services.files
        content = b"".join([part async for part in files.read(self.team, file_id)])
        return [orjson.loads(line) for line in content.splitlines()]


@contextlib.contextmanager
def open_processes(loop: asyncio.AbstractEventLoop, bench: Bench) -> Iterator[Sequence[Process]]:
    settings = bench.settings.model_copy(update={"batch_in_flight": 3})
    stack = contextlib.AsyncExitStack()

    async def begin() -> Process:
        database = PausingDatabase(settings, "process")
        await stack.enter_async_context(database)
        services = Services(settings, database, ServerPool(database, settings))
        # As if Triton had been seen with it: what is accepted does not depend on Triton.
        services.registry._models = {MODEL: Model(MODEL, 1, True, "", None)}
        return Process(services, database)

    try:
        yield [loop.run_until_complete(begin()) for _ in range(2)]
    finally:
        loop.run_until_complete(stack.aclose())


@pytest.fixture
def machine(
    postgres_server: PostgresServer, template: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[BatchMachine]]:
    monkeypatch.setattr(feed_module, "_POLL_SECONDS", 0.0)  # rules begin the steps
    monkeypatch.setattr(feed_module, "_GATHER_SECONDS", 0.0)
    with (
        loop_and_bench(postgres_server, template) as (loop, bench),
        open_processes(loop, bench) as processes,
    ):
        BatchMachine.loop, BatchMachine.bench, BatchMachine.processes = loop, bench, processes
        yield BatchMachine


def test_each_line_reaches_one_end(machine: type[BatchMachine]) -> None:
    check_machine(machine, examples=30, steps=25)


def test_a_cancelled_batch_ends_although_its_window_is_over(machine: type[BatchMachine]) -> None:
    batch = machine()
    batch.begin([LINES[0]])
    batch.cancel()
    batch.expire()
    batch.teardown()
