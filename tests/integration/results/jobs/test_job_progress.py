"""Counts and places of jobs: exact under concurrent ends, late commits, and processes that die."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from app.core.errors import Failure, FailureCode
from app.core.ids import new_id
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.queue.enqueue import NewResult, to_statement
from app.queue.finish import AttemptOutcome
from app.queue.job_rows import JobRow
from app.results.jobs import progress
from app.results.jobs.progress import JobKeeper
from app.results.jobs.results import JobResults
from app.results.jobs.rows import EndedRow, Job, NewJob
from app.results.jobs.store import JobStore
from tests.conftest import connect
from tests.integration.queue.queue_bench import Bench, ended, keyed, make_result, open_bench
from tests.integration.support import until

FAILED = Failure(FailureCode.MODEL_ERROR, "No.", False)
_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


class Jobs:
    """A queue with jobs, and the keepers of several processes."""

    def __init__(self, bench: Bench, settings: Settings) -> None:
        self.bench = bench
        self.store = JobStore(bench.database, settings)
        self.results = JobResults(bench.database)
        self.keepers = [JobKeeper(bench.database) for _ in range(3)]

    async def create(self, **members: Any) -> UUID:
        new = NewJob(new_id(), "default", "", None, None, 0, None, None, "{}", 10**6)
        job, _ = await self.store.create(replace(new, **members))
        return job.id

    async def add(self, job: UUID, *keys: str) -> list[bool]:
        return await self.bench.queue.enqueue([job_row(job, key) for key in keys])

    async def get(self, job: UUID) -> Job:
        return await self.store.get("default", job)

    async def keep(self) -> None:
        """Let a keeper do everything that is due."""
        keeper = JobKeeper(self.bench.database)
        while await keeper.step() == 0:
            pass

    async def rows(self, job: UUID, after: int = 0) -> Sequence[EndedRow]:
        page = await self.results.page("default", job, state=None, after=after, limit=1000)
        return page.rows


async def until_it_waits(task: asyncio.Task[Any], jobs: Jobs) -> None:
    """Its statement waits in PostgreSQL for another transaction."""
    waits = jobs.bench.connection.fetchval

    async def is_so() -> bool:
        return task.done() or bool(await waits(_WAITING))

    await until(is_so)
    assert not task.done()


def job_row(job: UUID, key: str, **members: Any) -> NewResult:
    return make_result(job=JobRow(job, key, b"hash"), **members)


@pytest.fixture
async def jobs(settings: Settings) -> AsyncIterator[Jobs]:
    async with open_bench(settings) as bench:
        yield Jobs(bench, settings)


async def test_counts_are_exact_before_and_after_they_are_stored(jobs: Jobs) -> None:
    job = await jobs.create()
    await jobs.add(job, *"abcd")
    worker = await jobs.bench.worker()
    first, second, third, _ = await jobs.bench.claim(worker)
    failed = ended(third, AttemptOutcome.FAILED, failure=FAILED, prompt_tokens=5)
    await jobs.bench.end(worker, ended(first), ended(second), failed)
    for is_kept in (False, True):
        if is_kept:
            await jobs.keep()
        found = await jobs.get(job)
        assert (found.rows, found.pending, found.completed) == (4, 1, 2)
        assert found.errors == {"model_error": 1}
        assert (found.prompt_tokens, found.completion_tokens) == (5, 6)
        assert found.is_settled is is_kept
    assert [row.place for row in await jobs.rows(job)] == [1, 2, 3]


async def test_a_reader_misses_no_end_that_is_committed_late(
    jobs: Jobs, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first end has the lower number and is committed last."""
    monkeypatch.setattr(progress, "_LATE_SECONDS", 0.0)
    job = await jobs.create()
    await jobs.add(job, "late", "early")
    ids = {row["key"]: row["result_id"] for row in await jobs.bench.connection.fetch(
        "SELECT key, result_id FROM job_rows")}  # fmt: skip
    end = "UPDATE results SET state = 'completed', output = 'x', finished_at = now() WHERE id = $1"
    slow = await connect(settings)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute(end, ids["late"])
    await jobs.bench.connection.execute(end, ids["early"])
    await jobs.store.close("default", job)
    await jobs.keep()
    (early,) = await jobs.rows(job)
    assert early.key == "early"
    assert (await jobs.get(job)).ended_at is None
    await transaction.commit()
    await slow.close()
    await jobs.keep()
    (late,) = await jobs.rows(job, after=early.place)
    assert late.key == "late"
    assert (await jobs.get(job)).state == "ended"


async def test_a_job_does_not_end_before_its_late_rows_are_counted(jobs: Jobs) -> None:
    job = await jobs.create()
    await jobs.add(job, "counted")
    await jobs.keep()
    await jobs.add(job, "late")
    late = await jobs.bench.connection.fetchval("SELECT max(id) FROM job_events")
    worker = await jobs.bench.worker()
    claims = await jobs.bench.claim(worker)
    await jobs.bench.end(worker, ended(claims[0]))
    await jobs.store.close("default", job)
    # One row is counted and one end: the event of the other row was committed behind those of the end.
    keeper = jobs.keepers[0]
    keeper._place = late
    await keeper.count()
    assert (await jobs.get(job)).ended_at is None
    await jobs.keep()
    found = await jobs.get(job)
    assert (found.rows, found.pending, found.state) == (2, 1, "closed")


async def follow(jobs: Jobs, job: UUID) -> list[EndedRow]:
    """Read the ended rows of a job until it has ended, as a client does."""
    found: list[EndedRow] = []
    while True:
        is_over = (await jobs.get(job)).state == "ended"
        rows = await jobs.rows(job, after=found[-1].place if found else 0)
        found += rows
        if is_over and not rows:
            return found


async def test_each_end_is_read_once_while_others_end(jobs: Jobs) -> None:
    """Workers end rows of two jobs, three keepers count, and a reader follows each job."""
    count = 600
    pair = [await jobs.create(), await jobs.create()]
    for job in pair:
        for start in range(0, count, 200):
            await jobs.add(job, *(str(place) for place in range(start, start + 200)))
        await jobs.store.close("default", job)

    async def keep(keeper: JobKeeper) -> None:
        while True:
            await keeper.step()
            await asyncio.sleep(0)

    async def work(worker: UUID) -> None:
        lane = jobs.bench.queue.end_batcher(worker, 5.0)
        while claims := await jobs.bench.claim(worker, 37):
            await asyncio.gather(*(lane.submit(ended(claim)) for claim in claims))

    workers = [await jobs.bench.worker() for _ in range(4)]
    keepers = [asyncio.create_task(keep(keeper)) for keeper in jobs.keepers]
    followers = [asyncio.create_task(follow(jobs, job)) for job in pair]
    await asyncio.gather(*map(work, workers))
    for job, read in zip(pair, await asyncio.gather(*followers), strict=True):
        assert len(read) == count
        assert len({row.key for row in read}) == count
        assert [row.place for row in read] == list(range(1, count + 1))
        assert (await jobs.get(job)).completed == count
    await cancel_all(keepers)


@pytest.mark.parametrize("statement", ["_PLACE", "_DISMISS", "_ADD", "_CONTINUE", "_END"])
async def test_a_keeper_that_dies_changes_nothing(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    job = await jobs.create()
    await jobs.add(job, "a", "b")
    worker = await jobs.bench.worker()
    await jobs.bench.end(worker, *[ended(claim) for claim in await jobs.bench.claim(worker)])
    await jobs.store.close("default", job)
    before = await jobs.get(job)
    broken = getattr(progress, statement)
    broken = broken.replace("WHERE", "WHERE 1 / (SELECT 0) = 1 AND", 1)
    monkeypatch.setattr(progress, statement, broken)
    with pytest.raises(asyncpg.DivisionByZeroError):
        await jobs.keep()
    assert await jobs.get(job) == before
    assert await jobs.rows(job) == []
    monkeypatch.undo()
    await jobs.keep()
    assert (await jobs.get(job)).state == "ended"
    assert len(await jobs.rows(job)) == 2


async def test_a_row_waits_for_a_closing_under_way(jobs: Jobs, settings: Settings) -> None:
    job = await jobs.create()
    closing = await connect(settings)
    transaction = closing.transaction()
    await transaction.start()
    await closing.execute("SELECT FROM jobs WHERE id = $1 FOR UPDATE", job)
    await closing.execute("UPDATE jobs SET closed_at = now() WHERE id = $1", job)
    late = asyncio.create_task(jobs.add(job, "late"))
    await until_it_waits(late, jobs)
    await transaction.commit()
    await closing.close()
    assert await late == [False]
    assert (await jobs.get(job)).rows == 0


async def test_a_statement_that_is_older_than_the_closing_stores_no_row(
    jobs: Jobs, settings: Settings
) -> None:
    """It waits for another's idempotency key, with a snapshot in which the job is open."""
    job = await jobs.create()
    holding = await connect(settings)
    transaction = holding.transaction()
    await transaction.start()
    held = keyed("held")
    statement, arguments = to_statement([held], [False], None)
    await holding.fetch(statement, *arguments)
    storing = asyncio.create_task(
        jobs.bench.queue.enqueue([keyed("held", priority=1), job_row(job, "late")])
    )
    await until_it_waits(storing, jobs)
    await jobs.store.close("default", job)
    assert not storing.done()
    await transaction.rollback()
    await holding.close()
    assert await storing == [True, False]
    assert (await jobs.get(job)).rows == 0


async def test_a_closing_waits_for_rows_that_are_being_stored(
    jobs: Jobs, settings: Settings
) -> None:
    job = await jobs.create()
    storing = await connect(settings)
    transaction = storing.transaction()
    await transaction.start()
    statement, arguments = to_statement([job_row(job, "early")], [False], None)
    await storing.fetch(statement, *arguments)
    closing = asyncio.create_task(jobs.store.close("default", job))
    await until_it_waits(closing, jobs)
    await transaction.commit()
    await storing.close()
    closed = await closing
    assert (closed.closed_at is not None, closed.rows) == (True, 1)


@pytest.mark.parametrize("seed", range(4))
async def test_rows_and_a_closing_at_once(jobs: Jobs, seed: int) -> None:
    job = await jobs.create()
    keeper = JobKeeper(jobs.bench.database)

    async def add(key: int) -> int:
        await asyncio.sleep((key * (seed + 3) % 7) * 0.002)  # rows are spread around the closing
        return sum(await jobs.add(job, str(key)))

    async def close() -> None:
        await asyncio.sleep(0.004 * seed)  # the moment of the closing, another for each seed
        await jobs.store.close("default", job)
        await keeper.step()

    *stored, _ = await asyncio.gather(*(add(key) for key in range(60)), close())
    await jobs.keep()
    found = await jobs.get(job)
    assert found.rows == found.pending == sum(filter(None, stored))
    assert (found.state == "ended") == (found.rows == 0)


async def test_a_statement_that_is_sent_again_counts_once(jobs: Jobs) -> None:
    """The first sending was committed, and its answer was lost."""
    job = await jobs.create()
    results = [job_row(job, "a"), job_row(job, "b")]
    assert await jobs.bench.queue.enqueue(results) == [True, True]
    async with jobs.bench.database.connection() as connection:
        assert await jobs.bench.queue._enqueue(connection, results, True) == [True, True]
    assert (await jobs.get(job)).rows == 2
    await jobs.keep()
    assert (await jobs.get(job)).rows == 2


async def test_a_result_without_its_context_takes_no_key(jobs: Jobs) -> None:
    job = await jobs.create()
    refused = job_row(job, "a", new_context=None)
    assert await jobs.bench.queue.enqueue([refused, job_row(job, "b")]) == [False, True]
    assert (await jobs.get(job)).rows == 1
    assert await jobs.add(job, "a") == [True]


async def test_rows_beside_others_in_one_statement(jobs: Jobs) -> None:
    first, second = await jobs.create(), await jobs.create(team_id="blue")
    results = [
        job_row(first, "a"), make_result(), job_row(second, "a"), job_row(first, "a"),
        job_row(new_id(), "a"), job_row(first, "b"),
    ]  # fmt: skip
    assert await jobs.bench.queue.enqueue(results) == [True, True, False, False, False, True]
    assert (await jobs.get(first)).rows == 2
    assert (await jobs.store.get("blue", second)).rows == 0
    assert await jobs.bench.connection.fetchval("SELECT count(*) FROM contexts") == 3
    stored = await jobs.bench.connection.fetch("SELECT job_id FROM results")
    assert sorted(str(row["job_id"]) for row in stored) == sorted([str(first)] * 2 + ["None"])


async def test_every_way_to_end_is_noted(jobs: Jobs) -> None:
    """By its worker, a cancellation, a deadline and a rescue; none of them has code for jobs."""
    job = await jobs.create()
    queue, connection = jobs.bench.queue, jobs.bench.connection
    await jobs.add(job, "cancelled", "expired", "rescued", "deleted")
    ids = {row["key"]: row["result_id"] for row in await connection.fetch(
        "SELECT key, result_id FROM job_rows")}  # fmt: skip
    await queue.cancel("default", id=ids["cancelled"])
    await connection.execute("UPDATE results SET deadline_at = now() WHERE id = $1", ids["expired"])
    assert await queue.expire() == 1
    await connection.execute("DELETE FROM results WHERE id = $1", ids["deleted"])
    worker = await jobs.bench.worker()
    (claim,) = await jobs.bench.claim(worker)
    await connection.execute(
        "UPDATE results SET lost_attempts = 90, on_disconnect = 'cancel' WHERE id = $1", claim.id
    )
    assert await queue.release([worker]) == 1
    await jobs.keep()
    found = await jobs.get(job)
    assert found.pending == 0
    assert found.errors == {
        "cancelled": 1, "deadline_exceeded": 1, "worker_lost": 1, "deleted": 1,
    }  # fmt: skip


async def test_results_without_a_job_leave_no_event(jobs: Jobs) -> None:
    await jobs.bench.add(3)
    worker = await jobs.bench.worker()
    claims = await jobs.bench.claim(worker)
    await jobs.bench.end(worker, ended(claims[0]), ended(claims[1]))
    await jobs.bench.connection.execute("DELETE FROM results")
    number = await jobs.bench.connection.fetchval("SELECT nextval('job_events_id_seq')")
    assert number == 1
