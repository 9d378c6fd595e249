"""Ends of attempts, cancellations and expiry beside each other, rescues and deletions."""

import pytest

from app.queue.claim import Claim
from app.queue.finish import AttemptOutcome
from tests.integration.queue.queue_bench import MODEL, Bench, chunk, ended
from tests.integration.queue.schedules.checks import Schedules
from tests.integration.queue.schedules.scheduler import Process, Schedule
from tests.integration.queue.schedules.works import (
    TEAM,
    WEBHOOK,
    cancelling,
    claiming,
    ending,
    expiring,
    facts,
    rescuing,
    running,
)

# One database for all tests of this file.
pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]


async def test_an_end_and_a_rescue(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench, lease=0.0, webhook_url=WEBHOOK)
        left, right = await schedule.run(ending(claim, worker), rescuing)
        assert left == [not right]
        expected = ("pending", None, 1, None) if right else ("completed", worker, 1, None)
        assert await facts(bench, result_id) == expected

    await schedules.check(example)


async def test_a_late_end_and_the_next_claim(schedules: Schedules, bench: Bench) -> None:
    """The worker that lost the result ends its attempt while another worker claims the next one."""

    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench, lease=0.0)
        assert await bench.queue.rescue(0.0) == 1
        other = await bench.worker()
        left, right = await schedule.run(ending(claim, worker), claiming(other))
        assert left == [False]
        # A claim skips a row that the end has locked; the next one takes it.
        assert len(right or await bench.claim(other)) == 1
        assert await facts(bench, result_id) == ("pending", other, 2, None)

    await schedules.check(example)


async def test_the_end_of_an_attempt_and_the_next_attempt_of_the_same_worker(
    schedules: Schedules, bench: Bench
) -> None:
    """An end that is sent twice does not end the attempt that came between."""

    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench)

        async def hand_back_and_claim(process: Process) -> list[Claim]:
            returned = ended(claim, AttemptOutcome.RETURNED)
            await process.end(worker, returned)
            return await process.claim(worker)

        left, right = await schedule.run(hand_back_and_claim, ending(claim, worker))
        if right == [True]:
            assert left == []
            expected = ("completed", worker, 1, None)
        else:
            assert len(left or await bench.claim(worker)) == 1
            expected = ("pending", worker, 2, None)
        assert await facts(bench, result_id) == expected

    await schedules.check(example)


async def test_an_end_and_a_cancellation(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench, webhook_url=WEBHOOK)
        left, right = await schedule.run(ending(claim, worker), cancelling(result_id))
        assert left == [True]
        expected = ("failed", worker, 1, "cancelled") if right else ("completed", worker, 1, None)
        assert await facts(bench, result_id) == expected

    await schedules.check(example)


async def test_a_return_to_the_queue_and_a_cancellation(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench)
        left, right = await schedule.run(
            ending(claim, worker, AttemptOutcome.LOST), cancelling(result_id)
        )
        assert (left, right) == ([True], 1)
        state, _, _, error = await facts(bench, result_id)
        assert (state, error) == ("failed", "cancelled")

    await schedules.check(example)


async def test_an_end_and_a_retirement(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench)
        left, right = await schedule.run(
            ending(claim, worker), lambda process: process.queue.retire(worker)
        )
        assert left == [not right]
        expected = ("pending", None, 1, None) if right else ("completed", worker, 1, None)
        assert await facts(bench, result_id) == expected

    await schedules.check(example)


async def test_a_retirement_and_a_rescue(schedules: Schedules, bench: Bench) -> None:
    """One of them releases the result, and only the rescuer counts its attempt."""

    async def example(schedule: Schedule) -> None:
        result_id, worker, _ = await running(bench, lease=0.0)
        left, right = await schedule.run(lambda process: process.queue.retire(worker), rescuing)
        assert left + right == 1
        assert await facts(bench, result_id) == ("pending", None, 1, None)
        assert (await bench.row(result_id))["lost_attempts"] == right

    await schedules.check(example)


async def test_two_rescues(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, _, _ = await running(bench, lease=0.0, webhook_url=WEBHOOK)
        left, right = await schedule.run(rescuing, rescuing)
        assert left + right == 1
        assert await facts(bench, result_id) == ("pending", None, 1, None)
        assert (await bench.row(result_id))["lost_attempts"] == 1

    await schedules.check(example)


async def test_an_end_and_a_deletion(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench, webhook_url=WEBHOOK)
        await bench.queue.append(worker, [chunk(claim, 0, "some")])
        left, right = await schedule.run(
            ending(claim, worker),
            lambda process: process.results.delete(TEAM, result_id, force=True),
        )
        assert right is None
        assert left in ([True], [False])
        assert await bench.connection.fetchval("SELECT count(*) FROM results") == 0

    await schedules.check(example)


async def test_text_and_a_deletion(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, worker, claim = await running(bench)
        await schedule.run(
            lambda process: process.queue.append(worker, [chunk(claim, 0, "some")]),
            lambda process: process.results.delete(TEAM, result_id, force=True),
        )
        assert await bench.connection.fetchval("SELECT count(*) FROM results") == 0

    await schedules.check(example)


async def test_ends_and_cancellations_of_several(schedules: Schedules, bench: Bench) -> None:
    """Rows are locked in one order, also if the ends come in another."""

    async def example(schedule: Schedule) -> None:
        worker = await bench.worker()
        await bench.add(3)
        claims = await bench.claim(worker)
        ends = [ended(claim) for claim in reversed(claims)]
        middle = claims[1].id
        await schedule.close_gate("SELECT FROM results WHERE id = $1 FOR UPDATE", middle)
        left, right = await schedule.run(
            lambda process: process.end(worker, *ends),
            lambda process: process.queue.cancel(TEAM, model_name=MODEL),
        )
        assert left == [True] * 3
        assert right in (0, 3)

    await schedules.check(example)


async def test_two_cancellations(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        await bench.add(2, webhook_url=WEBHOOK)
        left, right = await schedule.run(
            lambda process: process.queue.cancel(TEAM), lambda process: process.queue.cancel(TEAM)
        )
        assert left + right == 2

    await schedules.check(example)


async def test_a_cancellation_and_an_expiry(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        (result_id,) = await bench.add(deadline_seconds=0.0, webhook_url=WEBHOOK)
        left, right = await schedule.run(cancelling(result_id), expiring)
        assert left + right == 1
        error = "cancelled" if left else "deadline_exceeded"
        assert await facts(bench, result_id) == ("failed", None, 0, error)

    await schedules.check(example)
