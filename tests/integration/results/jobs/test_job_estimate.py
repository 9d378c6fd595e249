"""The remaining time of a job: by the speed of the rows that run, not by the time since its creation."""

from uuid import UUID

import pytest

from app.queue.finish import AttemptOutcome
from app.queue.job_rows import JobRow
from tests.integration.queue.queue_bench import ended, make_result
from tests.integration.results.jobs.test_job_progress import FAILED, Jobs, jobs

__all__ = ["jobs"]

_AGE = """
UPDATE job_progress SET began_at = began_at - make_interval(secs => $1),
  changed_at = changed_at - make_interval(secs => $1)
"""


async def pass_time(jobs: Jobs, seconds: float) -> None:
    await jobs.bench.connection.execute(_AGE, seconds)


async def end(jobs: Jobs, count: int, *, are_failed: bool = False) -> None:
    """Claim rows and end some of them."""
    worker = await jobs.bench.worker()
    claims = await jobs.bench.claim(worker, count)
    assert len(claims) == count
    outcome = AttemptOutcome.FAILED if are_failed else AttemptOutcome.COMPLETED
    failure = FAILED if are_failed else None
    ends = [ended(claim, outcome, failure=failure) for claim in claims]
    await jobs.bench.end(worker, *ends)
    await jobs.keep()


async def retry(jobs: Jobs, job: UUID) -> None:
    """Send all failed rows again."""
    failed = [row for row in await jobs.rows(job) if row.ended_as != "completed"]
    await jobs.bench.queue.enqueue(
        [
            make_result(job=JobRow(job, row.key, b"hash", row.result_id, row.ended_as))
            for row in failed
        ]
    )


async def left(jobs: Jobs, job: UUID) -> float | None:
    return (await jobs.get(job)).seconds_left


async def test_the_rest_takes_as_long_as_the_speed_so_far_says(jobs: Jobs) -> None:
    job = await jobs.create()
    await jobs.add(job, *"abcdef")
    await jobs.store.close("default", job)
    await end(jobs, 2)
    await pass_time(jobs, -60)  # however slow this machine is
    assert await left(jobs, job) is None  # too early
    await pass_time(jobs, 2_060)
    assert await left(jobs, job) == pytest.approx(4_000, rel=0.2)
    await end(jobs, 4)
    assert await left(jobs, job) is None
    assert (await jobs.get(job)).state == "ended"


async def test_retried_rows_have_a_speed_of_their_own(jobs: Jobs) -> None:
    """The job ended two days ago; an estimate by its age would be one of days."""
    job = await jobs.create()
    await jobs.add(job, *"abcdefgh")
    await jobs.store.close("default", job)
    await end(jobs, 8, are_failed=True)
    await pass_time(jobs, 2 * 86_400)
    await retry(jobs, job)
    assert await left(jobs, job) is None  # before they are counted
    await jobs.keep()
    assert await left(jobs, job) is None
    await end(jobs, 2)
    await pass_time(jobs, 1_000)
    assert await left(jobs, job) == pytest.approx(3_000, rel=0.2)


async def test_rows_that_are_retried_beside_others_are_part_of_their_run(jobs: Jobs) -> None:
    job = await jobs.create()
    await jobs.add(job, *"abcdef")
    await end(jobs, 3, are_failed=True)
    await pass_time(jobs, 2_000)
    await retry(jobs, job)
    await jobs.keep()
    # 3 ends in 2,000 seconds, 6 rows are left.
    assert await left(jobs, job) == pytest.approx(4_000, rel=0.2)


async def test_an_open_job_expects_more_rows(jobs: Jobs) -> None:
    job = await jobs.create(total=10)
    await pass_time(jobs, 36_000)  # created ten hours before its first row
    for key in "ab":  # sent one by one, and ended as fast
        await jobs.add(job, key)
        await end(jobs, 1)
    await pass_time(jobs, 1_000)
    assert await left(jobs, job) == pytest.approx(4_000, rel=0.2)


async def test_rows_after_a_rest_begin_a_run(jobs: Jobs) -> None:
    job = await jobs.create(total=10)
    await jobs.add(job, "a")
    await end(jobs, 1)
    await pass_time(jobs, 600)  # the client has stopped
    await jobs.add(job, "b", "c")
    await jobs.keep()
    await end(jobs, 1)
    await pass_time(jobs, 500)
    assert await left(jobs, job) == pytest.approx(4_000, rel=0.2)
