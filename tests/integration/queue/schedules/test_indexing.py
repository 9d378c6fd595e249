"""Indexing of ended results beside itself, and beside what deletes or erases them."""

from datetime import timedelta
from uuid import UUID

import pytest

from app.core.ids import created_at
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer
from app.results.retention.retention import Retention
from tests.integration.queue.queue_bench import Bench, ended, keyed
from tests.integration.queue.schedules.checks import Schedules
from tests.integration.queue.schedules.scheduler import Process, Schedule, Work
from tests.integration.queue.schedules.works import TEAM, WEBHOOK

# One database for all tests of this file.
pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]

COUNTED = "SELECT coalesce(sum(results), 0)::int FROM minute_stats"
WALK = "UPDATE digest_state SET passes_left = 2, resumes_at = now() - interval '1 h', digested_from = DEFAULT"


async def index(process: Process, rows: int = 500) -> None:
    depth = QueueDepth(process.database, process.settings)
    indexer = ResultIndexer(process.database, depth, process.settings)
    indexer._max_rows = rows
    await indexer.index()


async def walk(process: Process) -> None:
    depth = QueueDepth(process.database, process.settings)
    await ResultIndexer(process.database, depth, process.settings).index_older()


async def end_some(bench: Bench, count: int = 2, *, store: bool = True) -> list[UUID]:
    """Results that ended, with keys and deliveries, and are not indexed yet."""
    news = [keyed(str(number), store=store, webhook_url=WEBHOOK) for number in range(count)]
    assert await bench.queue.enqueue(news) == [True] * count
    worker = await bench.worker()
    claims = await bench.claim(worker)
    assert await bench.end(worker, *map(ended, claims)) == [True] * count
    await bench.connection.execute(
        "UPDATE webhook_deliveries SET state = 'failed', finished_at = now()"
    )
    return [new.id for new in news]


def retaining(ids: list[UUID]) -> Work:
    async def work(process: Process) -> int:
        now = created_at(ids[0]) + timedelta(days=1)
        return await Retention(process.database, process.settings, share=1.0)._delete(
            TEAM, ids, now, now, now
        )

    return work


@pytest.mark.parametrize("rows", [1, 500])
async def test_two_indexers(schedules: Schedules, bench: Bench, rows: int) -> None:
    """Each result is counted once, by either of them."""

    async def example(schedule: Schedule) -> None:
        ids = await end_some(bench, 3)
        await schedule.run(lambda one: index(one, rows), lambda one: index(one, rows))
        left = await bench.connection.fetchval("SELECT count(*) FROM undigested_results")
        assert left == (0 if rows == 500 else 1)
        assert await bench.connection.fetchval(COUNTED) == len(ids) - left

    await schedules.check(example)


async def test_an_indexer_and_a_walk(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        await end_some(bench)
        await bench.connection.execute(WALK)
        await schedule.run(index, walk)
        assert await bench.connection.fetchval(COUNTED) == 2

    await schedules.check(example)


async def test_two_walks(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        await end_some(bench)
        await bench.connection.execute(WALK)
        await schedule.run(walk, walk)
        assert await bench.connection.fetchval(COUNTED) == 2

    await schedules.check(example)


@pytest.mark.parametrize("reader", [index, walk])
@pytest.mark.parametrize("way", ["result", "context", "retention", "row"])
async def test_an_indexer_and_a_deletion(
    schedules: Schedules, bench: Bench, way: str, reader: Work
) -> None:
    """No row of a deleted result is left, whether it was counted or not."""

    async def example(schedule: Schedule) -> None:
        ids = await end_some(bench)
        await bench.connection.execute(WALK)
        context = await bench.connection.fetchval(
            "SELECT context_id FROM results WHERE id = $1", ids[0]
        )
        deletions: dict[str, Work] = {
            "result": lambda one: one.results.delete(TEAM, ids[0], force=False),
            "context": lambda one: one.contexts.delete(TEAM, context, force=False),
            "retention": retaining(ids),
            "row": lambda one: one.database.fetch("DELETE FROM results WHERE id = $1", ids[0]),
        }
        await schedule.run(reader, deletions[way])
        await index(Process(bench.database, bench.settings))
        assert await bench.connection.fetchval("SELECT count(*) FROM undigested_results") == 0

    await schedules.check(example)


async def test_an_indexer_and_an_erasure(schedules: Schedules, bench: Bench) -> None:
    async def example(schedule: Schedule) -> None:
        ids = await end_some(bench)
        await bench.connection.execute("UPDATE results SET store = false")
        await schedule.run(index, lambda one: one.erasure.erase(ids))
        await index(Process(bench.database, bench.settings))
        words = await bench.connection.fetch("SELECT FROM result_search WHERE words IS NOT NULL")
        assert words == []
        assert await bench.connection.fetchval(COUNTED) == 2

    await schedules.check(example)
