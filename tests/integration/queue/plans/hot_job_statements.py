"""The hot statements of jobs, run by the service's own functions on the rows of `full_queue`."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from app.queue.job_rows import JobRow
from app.results.jobs.progress import JobKeeper
from app.results.jobs.results import JobResults
from app.results.jobs.rows import EndState
from app.results.jobs.store import JobStore
from tests.integration.queue.plans.hot_statements import (
    BATCH,
    TEAM,
    HotStatement,
    Queue,
    new_results,
)


async def _enqueue_rows(queue: Queue) -> None:
    """New rows of a job, rows that are retried, and rows whose keys are taken."""
    results = new_results(queue, BATCH)
    rows = [JobRow(queue.ids.job, f"new {one.id}", b"hash") for one in results[: BATCH // 2]]
    for one in (*queue.ids.ended[:4], *queue.ids.waiting[:4]):
        rows.append(JobRow(queue.ids.job, f"key {one}", b"hash", one, "completed"))
        rows.append(JobRow(queue.ids.job, f"key {one}", b"hash"))
    placed = zip(results, rows, strict=False)
    await queue.jobs.enqueue([replace(one, job=row) for one, row in placed])


async def _find_rows(queue: Queue) -> None:
    store = JobStore(queue.database, queue.settings)
    ids = [*queue.ids.ended[:BATCH], *queue.ids.waiting[:BATCH]]
    await asyncio.gather(*(store.find_row(queue.ids.job, f"key {one}") for one in ids))


async def _read_job(queue: Queue) -> None:
    await JobStore(queue.database, queue.settings).get(TEAM, queue.ids.job)


async def _list_jobs(queue: Queue) -> None:
    store = JobStore(queue.database, queue.settings)
    await store.list(TEAM, state=None, after=None, limit=50)


async def _results_of_job(queue: Queue) -> None:
    results = JobResults(queue.database)
    states: Sequence[EndState | None] = (None, "completed", "failed")
    for state in states:
        await results.page(TEAM, queue.ids.job, state=state, after=500, limit=BATCH)


async def _count_events(queue: Queue) -> None:
    await JobKeeper(queue.database).count()


async def _cancel_rows(queue: Queue) -> None:
    await queue.database.run(JobKeeper(queue.database)._cancel_some)


HOT_JOB_STATEMENTS: Sequence[HotStatement] = (
    HotStatement("enqueue rows of a job", _enqueue_rows, 600, 2_000),
    HotStatement("find rows of a job", _find_rows, 500, 400),
    # With the events that are not counted yet, a thousand here.
    HotStatement("read a job", _read_job, 100, 2_500),
    HotStatement("list jobs", _list_jobs, 100, 2_500),
    HotStatement("results of a job", _results_of_job, 600, 600),
    HotStatement("count events of jobs", _count_events, 16_000, 16_000),  # a thousand
    HotStatement("cancel rows of jobs", _cancel_rows, 2_000, 3_000),
)
