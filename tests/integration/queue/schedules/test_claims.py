"""Claims beside each other, and beside what takes their results or their worker."""

from collections.abc import Callable
from functools import partial
from uuid import UUID

import pytest

from app.queue.claim import Claim
from tests.integration.queue.dispatcher import Dispatcher
from tests.integration.queue.queue_bench import MODEL, Bench, ended, make_result
from tests.integration.queue.schedules.checks import Schedules
from tests.integration.queue.schedules.scheduler import Process, Schedule, Work
from tests.integration.queue.schedules.works import (
    WEBHOOK,
    cancelling,
    claiming,
    ending,
    expiring,
    facts,
    lost,
    rescuing,
    running,
    within_limits,
)

# One database for all tests of this file.
pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]


async def test_two_claims_share_no_result(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        ids = await bench.add(3)
        first, second = await bench.worker(), await bench.worker()
        left, right = await schedule.run(claiming(first, 2), claiming(second, 2))
        assert sorted(claim.id for claim in left + right) == ids

    await schedules.check(example)


async def test_claims_within_limits_together(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        await bench.add(3)
        first, second = await bench.worker(), await bench.worker()
        left, right = await schedule.run(
            within_limits(first, most=2), within_limits(second, most=2)
        )
        assert len(left) + len(right) == 2

    await schedules.check(example)


async def test_a_claim_within_limits_and_the_end_of_a_running_result(
    schedules: Schedules, bench: Bench
) -> None:
    async def example(schedule: Schedule) -> None:
        _, worker, claim = await running(bench)
        await bench.add(2)
        left, right = await schedule.run(within_limits(worker), ending(claim, worker))
        assert right == [True]
        assert len(left) <= 1
        assert len(await bench.connection.fetch("SELECT FROM results WHERE worker_id IS NULL")) >= 1

    await schedules.check(example)


async def test_a_claim_and_a_cancellation(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        (result_id,) = await bench.add(webhook_url=WEBHOOK)
        worker = await bench.worker()
        left, right = await schedule.run(claiming(worker), cancelling(result_id))
        assert right == 1
        if left:
            assert await facts(bench, result_id) == ("pending", worker, 1, None)
            assert (await bench.row(result_id))["cancel_requested_at"] is not None
            assert await bench.end(worker, ended(left[0])) == [True]
        state, _, attempt, error = await facts(bench, result_id)
        assert (state, attempt, error) == ("failed", len(left), "cancelled")

    await schedules.check(example)


async def test_a_claim_and_an_expiry(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        (result_id,) = await bench.add(deadline_seconds=0.0)
        worker = await bench.worker()
        left, right = await schedule.run(claiming(worker), expiring)
        assert len(left) + right == 1
        expected = (
            ("pending", worker, 1, None) if left else ("failed", None, 0, "deadline_exceeded")
        )
        assert await facts(bench, result_id) == expected

    await schedules.check(example)


async def test_a_claim_and_the_retirement_of_its_worker(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        (result_id,) = await bench.add()
        worker = await bench.worker()
        left, right = await schedule.run(
            claiming(worker), lambda process: process.queue.retire(worker)
        )
        assert right == len(left)
        assert await facts(bench, result_id) == ("pending", None, len(left), None)

    await schedules.check(example)


async def test_a_claim_within_limits_and_the_retirement_of_its_worker(
    schedules: Schedules, bench: Bench
) -> None:
    async def example(schedule: Schedule) -> None:
        (result_id,) = await bench.add()
        worker = await bench.worker()
        left, right = await schedule.run(
            within_limits(worker), lambda process: process.queue.retire(worker)
        )
        assert right == len(left)
        assert await facts(bench, result_id) == ("pending", None, len(left), None)

    await schedules.check(example)


async def test_a_claim_and_the_rescue_from_its_worker(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        (result_id,) = await bench.add()
        worker = await bench.worker(lease_seconds=0.0)
        left, right = await schedule.run(claiming(worker), rescuing)
        assert right <= len(left)
        owner = None if right or not left else worker
        assert await facts(bench, result_id) == ("pending", owner, len(left), None)

    await schedules.check(example)


@pytest.mark.parametrize("way", [claiming, partial(within_limits, most=3)], ids=["all", "limited"])
async def test_a_suspect_runs_alone(
    schedules: Schedules, bench: Bench, way: Callable[[UUID], Work]
) -> None:
    """The end of the attempt that makes it a suspect, then its claim; and a claim of others."""

    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench)
        await bench.connection.execute("UPDATE results SET engine_deaths = 1")
        await bench.add(2)
        other = await bench.worker()

        async def lose_and_claim(process: Process) -> list[Claim]:
            assert await process.end(worker, lost(claim)) == [True]
            return await process.queue.claim_suspects(worker, [MODEL])

        left, right = await schedule.run(lose_and_claim, way(other))
        assert [one.id for one in left] in ([], [result_id])
        assert len(right) <= 2

    await schedules.check(example)


async def test_a_suspect_runs_beside_no_eager_claim(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench)
        await bench.connection.execute("UPDATE results SET engine_deaths = 1")
        dispatcher = Dispatcher(await bench.worker())

        async def lose_and_claim(process: Process) -> list[Claim]:
            assert await process.end(worker, lost(claim)) == [True]
            return await process.queue.claim_suspects(worker, [MODEL])

        async def send(process: Process) -> list[Claim]:
            process.queue.dispatcher = dispatcher
            assert await process.queue.enqueue([make_result()]) == [True]
            return dispatcher.started

        left, right = await schedule.run(lose_and_claim, send)
        assert [one.id for one in left] in ([], [result_id])
        assert len(right) in (0, 1)

    await schedules.check(example)


async def test_two_claims_of_a_suspect(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        await bench.add(2)
        await bench.connection.execute("UPDATE results SET engine_deaths = 2")
        first, second = await bench.worker(), await bench.worker()
        left, right = await schedule.run(
            lambda process: process.queue.claim_suspects(first, [MODEL]),
            lambda process: process.queue.claim_suspects(second, [MODEL]),
        )
        assert len(left) + len(right) == 1

    await schedules.check(example)
