"""Statements of the queue beside locks that other transactions hold on rows."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from app.core.ids import new_id
from app.core.settings import Settings
from app.queue import rescue
from tests.conftest import connect
from tests.integration.queue.queue_bench import Bench, ended
from tests.integration.support import until

ATTRIBUTION = f'{{"id": "{new_id()}", "queue": "infini-gram/pile", "deadline_seconds": 60, "parameters": {{}}}}'
SECONDS = 20  # a statement that does not wait takes milliseconds


@pytest.fixture
async def holder(queue_settings: Settings) -> AsyncIterator[asyncpg.Connection]:
    """A connection with an open transaction."""
    connection = await connect(queue_settings)
    await connection.execute("BEGIN")
    yield connection
    await connection.close()


async def test_a_rescuer_passes_workers_that_another_one_judges(
    bench: Bench, holder: asyncpg.Connection
) -> None:
    held, other = await bench.worker(-1), await bench.worker(-1)
    await holder.execute("SELECT FROM workers WHERE id = $1 FOR UPDATE", held)
    async with asyncio.timeout(SECONDS):
        await rescue.mark_lost_workers(bench.connection, 0.0)
    dead = await bench.connection.fetch("SELECT id FROM workers WHERE dead_at IS NOT NULL")
    assert [row["id"] for row in dead] == [other]


async def test_an_attributed_end_waits_for_its_own_context_alone(
    bench: Bench, holder: asyncpg.Connection
) -> None:
    (identifier,) = await bench.add(attribution=ATTRIBUTION)
    (other,) = await bench.add(model_name="another")
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    await holder.execute(
        "SELECT FROM contexts WHERE id = (SELECT context_id FROM results WHERE id = $1) FOR UPDATE",
        other,
    )
    async with asyncio.timeout(SECONDS):
        assert await bench.end(worker, ended(claim, has_attribution=True)) == [True]
    assert (await bench.row(identifier))["state"] == "completed"


async def test_an_attributed_end_locks_its_context_before_its_result(
    bench: Bench, holder: asyncpg.Connection
) -> None:
    """A deletion of the context takes both in this order."""
    (identifier,) = await bench.add(attribution=ATTRIBUTION)
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    await holder.execute("SELECT FROM contexts FOR UPDATE")
    ending = asyncio.create_task(bench.end(worker, ended(claim, has_attribution=True)))
    await until(lambda: _waits_for_a_lock(bench))
    await holder.execute("SELECT FROM results WHERE id = $1 FOR UPDATE NOWAIT", identifier)
    await holder.execute("ROLLBACK")
    assert await ending == [True]


@pytest.mark.parametrize("limit", [None, 5])
async def test_a_claim_passes_results_that_are_being_cancelled(
    bench: Bench, holder: asyncpg.Connection, limit: int | None
) -> None:
    if limit is not None:
        await bench.limit_running(limit)
    held, free = await bench.add(2)
    worker = await bench.worker()
    await holder.execute("SELECT FROM results WHERE id = $1 FOR UPDATE", held)
    async with asyncio.timeout(SECONDS):
        assert [claim.id for claim in await bench.claim(worker, 1)] == [free]


async def _waits_for_a_lock(bench: Bench) -> bool:
    count: int = await bench.connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return count > 0
