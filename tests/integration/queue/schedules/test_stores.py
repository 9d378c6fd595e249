"""Files, webhooks and rates: what two processes claim or charge."""

from typing import Any
from uuid import UUID

import pytest

from app.batches.files import FileDetails
from app.core.errors import StorageFullError
from app.queue.rate_buckets import Bucket, Cost, RateBuckets
from app.webhooks.outbox import Due, Verdict
from tests.integration.queue.queue_bench import Bench
from tests.integration.queue.schedules.checks import Schedules
from tests.integration.queue.schedules.scheduler import Process, Schedule, Work
from tests.integration.queue.schedules.works import TEAM

# One database for all tests of this file.
pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]


LEASE = 60.0
DETAILS = FileDetails("batch", "a.jsonl")


# --- files -----


async def test_files_within_their_bound(schedules: Schedules) -> None:
    async def example(schedule: Schedule) -> None:
        async def store(process: Process) -> bool:
            writer = process.files.writer(TEAM)
            await writer.write(b"123456")
            try:
                await process.files.finish(TEAM, writer, DETAILS)
            except StorageFullError:
                return False
            return True

        assert sorted(await schedule.run(store, store)) == [False, True]

    await schedules.check(example)


# --- webhooks -----


async def ended_with_webhook(bench: Bench) -> UUID:
    (result_id,) = await bench.add(webhook_url="https://example.org/hook")
    assert await bench.queue.cancel(TEAM, id=result_id) == 1
    return result_id


def verdict(due: Due) -> Verdict:
    return Verdict(due, "delivered", 0.0, "{}")


async def test_a_delivery_is_claimed_once(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id = await ended_with_webhook(bench)
        left, right = await schedule.run(
            lambda process: process.outbox.claim(5, LEASE),
            lambda process: process.outbox.claim(5, LEASE),
        )
        assert [due.result_id for due in left + right] == [result_id]

    await schedules.check(example)


async def test_a_late_verdict_and_the_next_claim(
    schedules: Schedules, bench: Bench, process: Process
) -> None:
    async def example(schedule: Schedule) -> None:
        await ended_with_webhook(bench)
        (due,) = await process.outbox.claim(5, 0.0)
        _, right = await schedule.run(
            lambda one: one.outbox.conclude(verdict(due)), lambda one: one.outbox.claim(5, LEASE)
        )
        (row,) = await bench.connection.fetch("SELECT state, attempts FROM webhook_deliveries")
        assert tuple(row) == (("pending", 2) if right else ("delivered", 1))

    await schedules.check(example)


async def test_a_verdict_and_a_repetition(
    schedules: Schedules, bench: Bench, process: Process
) -> None:
    """A delivery that its team repeats is due, in spite of what the call before it returned."""

    async def example(schedule: Schedule) -> None:
        result_id = await ended_with_webhook(bench)
        (due,) = await process.outbox.claim(5, LEASE)
        _, right = await schedule.run(
            lambda one: one.outbox.conclude(verdict(due)),
            lambda one: one.outbox.redeliver(TEAM, result_id),
        )
        assert (right.state, right.attempts) == ("pending", 0)
        (row,) = await bench.connection.fetch("SELECT state, attempts FROM webhook_deliveries")
        assert tuple(row) == ("pending", 0)

    await schedules.check(example)


async def test_two_requests_make_one_secret(schedules: Schedules, process: Process) -> None:
    async def example(schedule: Schedule) -> None:
        left, right = await schedule.run(
            lambda one: one.outbox.secret(TEAM), lambda one: one.outbox.secret(TEAM)
        )
        assert left == right

    await schedules.check(example)


# --- rates -----


def taking(*buckets: str, capacity: float = 3.0) -> Work:
    costs = [Cost(bucket_of(name), capacity, 2.0) for name in buckets]

    async def work(process: Process) -> Any:
        return await process.database.run(lambda one: RateBuckets().take(one, [costs], False))

    return work


def bucket_of(name: str) -> Bucket:
    return TEAM, "m", name


async def test_a_bucket_is_charged_once(schedules: Schedules, process: Process) -> None:
    async def example(schedule: Schedule) -> None:
        await process.database.run(
            lambda one: RateBuckets().take(one, [[Cost(bucket_of("b"), 3.0, 0.0)]], False)
        )
        await schedule.close_gate("SELECT FROM rate_buckets FOR UPDATE")
        buckets = taking("a", "b", "c"), taking("c", "b", "a")
        (left,), (right,) = await schedule.run(*buckets)
        assert (left is None) != (right is None)

    await schedules.check(example)
