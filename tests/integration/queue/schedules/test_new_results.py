"""New results beside each other, and beside what removes their keys and contexts."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from app.core.errors import NotFoundError
from app.core.ids import created_at
from app.queue.claim import Claim
from app.queue.enqueue import NewResult
from app.results.retention.retention import Retention
from tests.integration.queue.dispatcher import Dispatcher
from tests.integration.queue.queue_bench import Bench, ended, keyed, make_result
from tests.integration.queue.schedules.checks import Schedules
from tests.integration.queue.schedules.scheduler import Process, Schedule, Work
from tests.integration.queue.schedules.works import (
    TEAM,
    enqueueing,
    facts,
)

# One database for all tests of this file.
pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]


async def test_one_key_names_one_result(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        async def send(process: Process, result: NewResult) -> UUID:
            if await process.queue.enqueue([result]) == [True]:
                return result.id
            taken = await process.keys.find(TEAM, "a")
            assert taken is not None
            return taken.result_id

        first, second = keyed("a"), keyed("a")
        left, right = await schedule.run(
            lambda one: send(one, first), lambda one: send(one, second)
        )
        (stored,) = await bench.connection.fetch("SELECT id FROM results")
        assert left == right == stored["id"]
        assert await bench.connection.fetchval("SELECT count(*) FROM contexts") == 1

    await schedules.check(example)


async def test_keys_in_opposite_orders(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        batches = [[keyed(key) for key in keys] for keys in ("abc", "cba")]
        await bench.queue.enqueue([keyed("b", seconds=0.0)])
        await schedule.close_gate("SELECT FROM idempotency_keys FOR UPDATE")
        left, right = await schedule.run(enqueueing(*batches[0]), enqueueing(*batches[1]))
        assert left == [not right[0]] * 3
        assert right == [right[0]] * 3
        assert await bench.connection.fetchval("SELECT count(*) FROM results") == 4

    await schedules.check(example)


async def test_a_key_and_the_deletion_of_its_result(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        old, new = keyed("a"), keyed("a")
        assert await bench.queue.enqueue([old]) == [True]
        (left, _) = await schedule.run(
            enqueueing(new), lambda process: process.results.delete(TEAM, old.id, force=True)
        )
        owners = await bench.connection.fetch("SELECT result_id FROM idempotency_keys")
        assert [row["result_id"] for row in owners] == [new.id] * left[0]
        assert await bench.connection.fetchval("SELECT count(*) FROM results") == left[0]

    await schedules.check(example)


async def test_a_key_and_its_expiry(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        old, new = keyed("a", seconds=0.0), keyed("a")
        assert await bench.queue.enqueue([old]) == [True]
        left, _ = await schedule.run(enqueueing(new), lambda process: process.keys.remove_expired())
        assert left == [True]
        owner = await bench.connection.fetchval("SELECT result_id FROM idempotency_keys")
        assert owner == new.id

    await schedules.check(example)


async def test_a_new_result_and_the_deletion_of_its_context(
    schedules: Schedules, bench: Bench
) -> None:
    async def example(schedule: Schedule) -> None:
        old = make_result()
        assert await bench.queue.enqueue([old]) == [True]
        new = make_result(new_context=None, context_id=old.context_id)
        left, right = await schedule.run(
            enqueueing(new),
            lambda process: process.contexts.delete(TEAM, old.context_id, force=True),
        )
        assert right is None
        assert left in ([True], [False])
        assert await bench.connection.fetchval("SELECT count(*) FROM results") == 0

    await schedules.check(example)


async def test_a_result_that_is_sent_again_and_the_deletion_of_its_context(
    schedules: Schedules, bench: Bench
) -> None:
    """The first sending was committed, and its result deleted: its context is there, but not for long."""

    async def example(schedule: Schedule) -> None:
        result = make_result()
        assert await bench.queue.enqueue([result]) == [True]
        await bench.connection.execute("DELETE FROM results")

        async def send_again(process: Process) -> bool:
            async with process.database.connection() as connection:
                (is_stored,) = await process.queue._enqueue(connection, [result], True)
            return is_stored

        async def delete(process: Process) -> None:
            await process.contexts.delete(TEAM, result.context_id, force=True)

        left, _ = await schedule.run(send_again, delete)
        assert left
        contexts, results = [
            await bench.connection.fetchval(f"SELECT count(*) FROM {table}")
            for table in ("contexts", "results")
        ]
        assert contexts == results

    await schedules.check(example)


async def test_new_results_of_two_processes_with_workers(
    schedules: Schedules, bench: Bench
) -> None:
    """Each claims its own result, as no other waits."""

    async def example(schedule: Schedule) -> None:
        dispatchers = [Dispatcher(await bench.worker()) for _ in range(2)]

        async def send(process: Process, dispatcher: Dispatcher) -> list[Claim]:
            process.queue.dispatcher = dispatcher
            assert await process.queue.enqueue([make_result()]) == [True]
            return dispatcher.started

        left, right = await schedule.run(
            lambda one: send(one, dispatchers[0]), lambda one: send(one, dispatchers[1])
        )
        assert (len(left), len(right)) == (1, 1)
        assert await bench.connection.fetchval("SELECT count(DISTINCT worker_id) FROM results") == 2

    await schedules.check(example)


async def test_an_eager_claim_and_the_retirement_of_its_worker(
    schedules: Schedules, bench: Bench
) -> None:
    async def example(schedule: Schedule) -> None:
        dispatcher = Dispatcher(await bench.worker())
        result = make_result()

        async def send(process: Process) -> int:
            process.queue.dispatcher = dispatcher
            assert await process.queue.enqueue([result]) == [True]
            return len(dispatcher.started)

        left, right = await schedule.run(
            send, lambda process: process.queue.retire(dispatcher.worker_id)
        )
        assert right == left
        assert await facts(bench, result.id) == ("pending", None, left, None)

    await schedules.check(example)


# --- retention and erasure of the prompts that they use ---------------------------------------------


async def over(bench: Bench, **members: Any) -> tuple[UUID, UUID]:
    """A result that has ended and was indexed, and its context."""
    new = make_result(**members)
    assert await bench.queue.enqueue([new]) == [True]
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    assert await bench.end(worker, ended(claim)) == [True]
    await bench.connection.execute("DELETE FROM undigested_results")
    await bench.connection.execute(
        "INSERT INTO result_search (result_id, team_id) VALUES ($1, $2)", new.id, TEAM
    )
    return new.id, new.context_id


def retaining(*ids: UUID) -> Work:
    async def work(process: Process) -> int:
        now = created_at(ids[0]) + timedelta(days=1)
        retention = Retention(process.database, process.settings, share=1.0)
        return await retention._delete(TEAM, ids, now, now, now)

    return work


async def contexts_of(bench: Bench) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await bench.connection.fetch("SELECT id, erased_at FROM contexts")
    return rows


@pytest.mark.parametrize("way", ["retention", "erasure"])
async def test_a_new_result_and_the_end_of_its_prompt(
    schedules: Schedules, bench: Bench, way: str
) -> None:
    """The new result is refused, or its prompt stays."""

    async def example(schedule: Schedule) -> None:
        old, context = await over(bench, store=way == "retention")
        new = make_result(new_context=None, context_id=context)
        remove = retaining(old) if way == "retention" else lambda one: one.erasure.erase([old])
        left, _ = await schedule.run(lambda one: one.queue.enqueue([new]), remove)
        has_prompt = [row["id"] for row in await contexts_of(bench) if row["erased_at"] is None]
        assert has_prompt == [context] * left[0]

    await schedules.check(example)


async def test_retention_and_a_deletion(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, _ = await over(bench)
        left, right = await schedule.run(
            retaining(result_id),
            lambda one: one.results.delete(TEAM, result_id, force=False),
        )
        assert left == int(isinstance(right, NotFoundError))
        assert await bench.connection.fetchval("SELECT count(*) FROM results") == 0

    await schedules.check(example)


async def test_two_passes_of_retention(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        first, context = await over(bench)
        second, _ = await over(bench, context_id=context, new_context=None)
        left, right = await schedule.run(retaining(first, second), retaining(second, first))
        left_over = await bench.connection.fetchval("SELECT count(*) FROM results")
        assert left + right + left_over == 2
        assert len(await contexts_of(bench)) == int(left_over > 0)

    await schedules.check(example)


async def test_retention_and_an_erasure(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, _ = await over(bench, store=False)
        await schedule.run(retaining(result_id), lambda one: one.erasure.erase([result_id]))
        texts = await bench.connection.fetch(
            "SELECT FROM results WHERE erased_at IS NULL OR output IS NOT NULL"
        )
        assert texts == []

    await schedules.check(example)


async def test_two_erasures(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        result_id, _ = await over(bench, store=False)
        await schedule.run(
            lambda one: one.erasure.erase([result_id]), lambda one: one.erasure.erase([result_id])
        )
        (row,) = await bench.connection.fetch("SELECT output, erased_at FROM results")
        assert row["output"] is None
        assert row["erased_at"] is not None

    await schedules.check(example)
