"""A batch over two processes that pause in the midst of a step, come back late, or die.

Each line reaches one end, in one file, and the counts add up. `FUZZ` is explained in
`tests/machines.py`.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID, uuid4

import orjson
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from app.api.container import Services
from app.batches import feed as feed_module
from app.batches.files import FileDetails
from app.batches.rows import Batch, NewBatch
from app.core.errors import ConflictError
from app.core.ids import new_id
from app.queue.finish import AttemptOutcome
from tests.database_copies import DatabaseCopies
from tests.integration.batches.pausing_process import UNLIMITED, Process, open_processes
from tests.integration.queue.queue_bench import MODEL, REFUSED, ended
from tests.machines import DatabaseMachine, check_machine, loop_and_bench
from tests.postgres import PostgresServer

ENDS = ("completed", "failed", "expired", "cancelled")
# The members of a line's request: one result, two, and a request that is refused.
LINES = ({"max_tokens": 4}, {"max_tokens": 4, "n": 2}, {"max_tokens": 0})


@dataclass(frozen=True)
class Step:
    """A step of the machine, and what it may need."""

    kind: str
    place: int  # the process
    statements: int  # until it stops
    is_dead: bool
    steps: int  # of a feed
    runs: bool  # results meanwhile


KINDS = (*["hand over"] * 6, *["work"] * 3, *["run"] * 2, "pause", "cancel", "expire", "delete")
steps = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    place=st.integers(0, 1),
    statements=st.integers(0, 9),
    is_dead=st.booleans(),
    steps=st.integers(1, 3),
    runs=st.booleans(),
)


class BatchMachine(DatabaseMachine):
    processes: ClassVar[Sequence[Process]]

    @property
    def client(self) -> Services:
        """The parts of a process that never pauses, for requests of clients."""
        return self.processes[2].services

    @initialize(
        kinds=st.lists(st.sampled_from(LINES), min_size=3, max_size=7), steps=st.integers(0, 2)
    )
    def begin(self, kinds: list[dict[str, int]], steps: int) -> None:
        self.team = f"team-{uuid4()}"
        self.sizes = [kind.get("n", 1) for kind in kinds]
        self.is_cancelled = self.is_expired = False
        self.worker = self.run(self.bench.worker())
        self.batch_id = self.run(self._create(kinds))
        self.run(self._work(self.processes[0], steps, runs=False))

    @rule(step=steps)
    def act(self, step: Step) -> None:
        """One rule for all: hypothesis leaves half of several rules out of each example."""
        self.run(self._act(step))

    @invariant()
    def counts_add_up(self) -> None:
        if hasattr(self, "batch_id"):
            self.run(self._check_counts())

    def teardown(self) -> None:
        if hasattr(self, "batch_id"):
            self.run(self._drain())

    # --- what the rules do --------------------------------------------------------------------------

    async def _act(self, step: Step) -> None:
        process, other = self.processes[step.place], self.processes[1 - step.place]
        if step.kind == "work":
            await self._work(process, step.steps, runs=step.runs)
        elif step.kind == "pause":
            await self._begin_step(process, step)
        elif step.kind == "hand over":  # and go on only after the other process
            await self._begin_step(process, step)
            await self._work(other, step.steps, runs=step.runs)
            await process.finish()
        elif step.kind == "run":
            outcome = AttemptOutcome.COMPLETED if step.runs else AttemptOutcome.FAILED
            await self._run_results(step.steps, outcome)
        elif step.kind == "cancel":
            await self.cancel()
        elif step.kind == "expire" and step.runs and step.is_dead:
            await self.expire()
        elif step.kind == "delete":
            await self._delete_a_result()

    async def cancel(self) -> None:
        with contextlib.suppress(ConflictError):
            await self.client.batches.cancel(self.team, self.batch_id)
            self.is_cancelled = True

    async def expire(self) -> None:
        self.is_expired = True
        await self.bench.connection.execute(
            "UPDATE batches SET expires_at = now() WHERE id = $1", self.batch_id
        )

    async def _delete_a_result(self) -> None:
        rows = await self.bench.connection.fetch(
            "SELECT id FROM results WHERE team_id = $1 LIMIT 1", self.team
        )
        for row in rows:
            await self.client.results.delete(self.team, row["id"], force=True)

    async def _create(self, kinds: Sequence[dict[str, int]]) -> UUID:
        services = self.client
        writer = services.files.writer(self.team)
        for number, kind in enumerate(kinds):
            body = {"model": MODEL, "prompt": "a", **kind}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            await writer.write(orjson.dumps(line | {"body": body}) + b"\n")
        file = await services.files.finish(self.team, writer, FileDetails("batch", "in.jsonl"))
        new = NewBatch(new_id(), self.team, "/v1/completions", file.id, "24h", "{}", 3600.0, None)
        batch, _ = await services.batches.create(new)
        return batch.id

    async def _take(self, process: Process) -> None:
        """Give the batch to a process without one; its lease has run out."""
        if process.feed is None:
            await self.bench.connection.execute(
                "UPDATE batches SET lease_expires_at = now() WHERE id = $1", self.batch_id
            )
            await process.take(self.batch_id)

    async def _begin_step(self, process: Process, step: Step) -> None:
        """Stop in the midst of a step, or die there."""
        await process.finish()
        await self._take(process)
        if step.runs:
            await self._run_results(2, AttemptOutcome.COMPLETED)
        if process.feed is not None:
            process.feed.on_ended(None)
            await process.advance(step.statements)
        if step.is_dead:
            await process.die()

    async def _work(self, process: Process, steps: int, *, runs: bool) -> None:
        await process.finish()
        await self._take(process)
        for _ in range(steps):
            if process.feed is not None:
                process.feed.on_ended(None)
                await process.advance(UNLIMITED)
                if runs:
                    await self._run_results(2, AttemptOutcome.COMPLETED)

    async def _run_results(self, count: int, outcome: AttemptOutcome) -> None:
        claims = await self.bench.claim(self.worker, count)
        failure = None if outcome is AttemptOutcome.COMPLETED else REFUSED
        if claims:
            await self.bench.end(
                self.worker, *(ended(claim, outcome, failure=failure) for claim in claims)
            )

    async def _batch(self) -> Batch:
        return await self.client.batches.get(self.team, self.batch_id)

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
        for process in self.processes[:2]:
            await process.finish()
            await process.die()
        last = self.processes[0]
        async with asyncio.timeout(60):
            while (await self._batch()).state not in ENDS:
                await self._take(last)
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
        files = self.client.files
        content = b"".join([part async for part in files.read(self.team, file_id)])
        return [orjson.loads(line) for line in content.splitlines()]


@pytest.fixture
def machine(
    postgres_server: PostgresServer,
    database_copies: DatabaseCopies,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[type[BatchMachine]]:
    monkeypatch.setattr(feed_module, "_POLL_SECONDS", 0.0)  # rules begin the steps
    monkeypatch.setattr(feed_module, "_GATHER_SECONDS", 0.0)
    with (
        loop_and_bench(postgres_server, database_copies) as (loop, bench),
        open_processes(loop, bench) as processes,
    ):
        BatchMachine.loop, BatchMachine.bench, BatchMachine.processes = loop, bench, processes
        yield BatchMachine


@pytest.mark.slow("draws sequences of all events; `make soak` draws FUZZ times as many")
@pytest.mark.soak
def test_each_line_reaches_one_end(machine: type[BatchMachine]) -> None:
    check_machine(machine, examples=50, steps=12)


def test_a_cancelled_batch_ends_although_its_window_is_over(machine: type[BatchMachine]) -> None:
    batch = machine()
    batch.begin([LINES[0]], 0)
    batch.run(batch.cancel())
    batch.run(batch.expire())
    batch.teardown()
