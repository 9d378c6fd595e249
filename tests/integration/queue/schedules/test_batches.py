"""Batches: clients and feeders, and two feeders of one batch."""

from uuid import UUID

import pytest

from app.batches.rows import Batch, LineOutcome, NewBatch, NewLine
from app.core.errors import ConflictError, LimitError
from app.core.ids import new_id
from app.queue.idempotency import NewKey
from tests.integration.queue.schedules.checks import Schedules
from tests.integration.queue.schedules.scheduler import Process, Schedule
from tests.integration.queue.schedules.works import TEAM

# One database for all tests of this file.
pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]


LEASE = 60.0


def new_batch(key: str | None = None) -> NewBatch:
    new_key = NewKey(key, b"hash", 60.0) if key else None
    return NewBatch(new_id(), TEAM, "/v1/completions", new_id(), "24h", "{}", 60.0, None, new_key)


async def stored_batch(process: Process, *, lines: int = 2, begun: bool = True) -> UUID:
    """A batch with lines, held by no feeder."""
    new = new_batch()
    await process.batches.create(new)
    await process.lines.add_lines(
        new.id, [NewLine(number, f"c{number}", "{}") for number in range(1, lines + 1)]
    )
    if begun:
        await process.lines.begin(new.id, lines)
    return new.id


def outcomes(*lines: int, is_completed: bool = True) -> list[LineOutcome]:
    return [LineOutcome(line, is_completed, "{}") for line in lines]


async def batch_of(process: Process, batch_id: UUID) -> Batch:
    return await process.batches.get(TEAM, batch_id)


async def test_one_key_names_one_batch(schedules: Schedules) -> None:
    async def example(schedule: Schedule) -> None:
        async def create(process: Process) -> tuple[UUID, bool]:
            batch, is_new = await process.batches.create(new_batch("a"))
            return batch.id, is_new

        left, right = await schedule.run(create, create)
        assert left[0] == right[0]
        assert {left[1], right[1]} == {True, False}

    await schedules.check(example)


async def test_a_team_has_one_open_batch(schedules: Schedules) -> None:
    async def example(schedule: Schedule) -> None:
        async def create(process: Process) -> bool:
            try:
                await process.batches.create(new_batch())
            except LimitError:
                return False
            return True

        assert sorted(await schedule.run(create, create)) == [False, True]

    await schedules.check(example)


async def test_a_batch_has_one_feeder(schedules: Schedules, process: Process) -> None:
    async def example(schedule: Schedule) -> None:
        batch_id = await stored_batch(process)
        feeders = new_id(), new_id()
        left, right = await schedule.run(
            lambda one: one.lines.claim(feeders[0], 5, LEASE),
            lambda one: one.lines.claim(feeders[1], 5, LEASE),
        )
        assert left + right == [(batch_id, TEAM)]

    await schedules.check(example)


async def test_two_feeders_send_a_line_under_the_same_ids(
    schedules: Schedules, process: Process
) -> None:
    async def example(schedule: Schedule) -> None:
        batch_id = await stored_batch(process)
        left, right = await schedule.run(
            lambda one: one.lines.assign(batch_id, {1: [new_id()], 2: [new_id(), new_id()]}),
            lambda one: one.lines.assign(batch_id, {1: [new_id()], 2: [new_id(), new_id()]}),
        )
        assert left.keys() == {1, 2}
        assert left == right

    await schedules.check(example)


async def test_two_feeders_count_a_line_once(schedules: Schedules, process: Process) -> None:
    async def example(schedule: Schedule) -> None:
        batch_id = await stored_batch(process, lines=3)
        left, right = outcomes(1, 2), outcomes(2, 3, is_completed=False)
        await schedule.run(
            lambda one: one.lines.mark_done(batch_id, left),
            lambda one: one.lines.mark_done(batch_id, right),
        )
        batch = await batch_of(process, batch_id)
        assert batch.completed + batch.failed == 3

    await schedules.check(example)


async def test_an_outcome_and_the_end_of_the_lines(schedules: Schedules, process: Process) -> None:
    async def example(schedule: Schedule) -> None:
        batch_id = await stored_batch(process)
        await process.lines.mark_done(batch_id, outcomes(1))
        await schedule.run(
            lambda one: one.lines.mark_done(batch_id, outcomes(2)),
            lambda one: one.lines.begin_end(batch_id),
        )
        batch = await batch_of(process, batch_id)
        assert batch.completed == 2
        assert batch.state in ("in_progress", "finalizing")

    await schedules.check(example)


async def test_a_cancellation_and_the_begin_of_a_batch(
    schedules: Schedules, process: Process
) -> None:
    async def example(schedule: Schedule) -> None:
        batch_id = await stored_batch(process, begun=False)
        left, right = await schedule.run(
            lambda one: one.batches.cancel(TEAM, batch_id),
            lambda one: one.lines.begin(batch_id, 2),
        )
        assert right is None
        assert left.state == "cancelling"
        batch = await batch_of(process, batch_id)
        assert (batch.state, batch.expected_end) == ("cancelling", "cancelled")
        assert (batch.in_progress_at is None) == (batch.total == 0)

    await schedules.check(example)


async def test_a_cancellation_and_the_refusal_of_a_batch(
    schedules: Schedules, process: Process
) -> None:
    async def example(schedule: Schedule) -> None:
        batch_id = await stored_batch(process, begun=False)
        left, _ = await schedule.run(
            lambda one: one.batches.cancel(TEAM, batch_id),
            lambda one: one.lines.refuse(batch_id, [{"code": "empty_file"}]),
        )
        state = (await batch_of(process, batch_id)).state
        assert state == ("failed" if isinstance(left, ConflictError) else "cancelling")

    await schedules.check(example)


async def test_a_cancellation_and_the_end_of_a_batch(
    schedules: Schedules, process: Process
) -> None:
    """Its feeder ends the batch as what it last saw, unless it was cancelled before its lines ended."""

    async def example(schedule: Schedule) -> None:
        batch_id, feeder = await stored_batch(process), new_id()
        assert await process.lines.claim(feeder, 1, LEASE) == [(batch_id, TEAM)]
        await process.lines.mark_done(batch_id, outcomes(1, 2))

        async def feed(one: Process) -> bool:
            await one.lines.begin_end(batch_id)
            batch = await one.lines.look(feeder, batch_id)
            assert batch is not None
            return await one.lines.end(feeder, batch, batch.expected_end, None, None)

        left, right = await schedule.run(lambda one: one.batches.cancel(TEAM, batch_id), feed)
        assert right is True
        state = (await batch_of(process, batch_id)).state
        assert state == ("completed" if isinstance(left, ConflictError) else "cancelled")

    await schedules.check(example)


async def test_a_delayed_feeder_ends_nothing(schedules: Schedules, process: Process) -> None:
    async def example(schedule: Schedule) -> None:
        batch_id, late, next_feeder = await stored_batch(process), new_id(), new_id()
        assert await process.lines.claim(late, 1, 0.0) == [(batch_id, TEAM)]
        await process.lines.mark_done(batch_id, outcomes(1, 2))
        await process.lines.begin_end(batch_id)
        batch = await batch_of(process, batch_id)

        async def take_over(one: Process) -> bool:
            if not await one.lines.claim(next_feeder, 1, LEASE):
                return False
            return await one.lines.end(next_feeder, batch, "completed", None, None)

        left, right = await schedule.run(
            lambda one: one.lines.end(late, batch, "completed", None, None), take_over
        )
        assert left is not right
        assert (await batch_of(process, batch_id)).state == "completed"

    await schedules.check(example)


async def test_a_delayed_feeder_sends_and_its_successor_stops(
    schedules: Schedules, process: Process
) -> None:
    """A cancelled batch ends no line while the late feeder's result may run."""

    async def example(schedule: Schedule) -> None:
        batch_id = await stored_batch(process, lines=1)

        async def send(one: Process) -> dict[int, list[UUID]]:
            ids = await one.lines.assign(batch_id, {1: [new_id()]})
            await one.lines.mark_sent(batch_id, list(ids))
            return ids

        async def stop(one: Process) -> int:
            await one.lines.mark_assigned_sent(batch_id)
            waiting = await one.lines.waiting(batch_id, 0, 10)
            await one.lines.mark_done(batch_id, outcomes(*(line.line for line in waiting)))
            return len(await one.lines.sent(batch_id))

        await schedule.run(send, stop)
        lines = await process.database.fetch("SELECT state FROM batch_lines")
        assert [line["state"] for line in lines] in (["sent"], ["done"])

    await schedules.check(example)
