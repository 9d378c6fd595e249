"""Indexers of several processes beside each other: none waits, each result is counted once."""

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial

import asyncpg
import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer
from tests.attribution_workers import environment_of
from tests.conftest import connect
from tests.integration.results.test_indexer import COUNTED, add, found
from tests.integration.support import until


@pytest.fixture
async def digest(settings: Settings) -> AsyncIterator[ResultIndexer]:
    async with Database(settings, "test") as database:
        yield ResultIndexer(database, QueueDepth(database, settings), settings)


async def test_indexers_do_not_wait_for_each_other(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    ids = await add(connection, 20)
    digest._max_rows = 10
    other = await connect(settings)
    async with Database(settings, "test") as database:
        second = ResultIndexer(database, digest._depth, settings)
        async with other.transaction():
            # The first one waits for the end of this row, in the middle of its batch.
            await other.execute("INSERT INTO result_search VALUES ($1, 'default')", ids[5])
            first = asyncio.create_task(digest.index())
            await until(
                lambda: connection.fetchval(
                    "SELECT pid FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
                )
            )
            await second.index()
            assert await connection.fetchval(COUNTED) == 10
            assert set(await found(connection, "text")) == set(ids[10:])
    await first
    await other.close()
    assert await connection.fetchval("SELECT count(*) FROM undigested_results") == 0
    assert await connection.fetchval(COUNTED) == 19  # the row marks that it is counted


async def test_workers_of_the_version_before_take_turns_with_these(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    """They hold the lock alone; these share it."""
    await add(connection, 3)
    alone = "SELECT pg_try_advisory_xact_lock(hashtext('digest'), 0)"
    await connection.execute("UPDATE digest_state SET resumes_at = now() - interval '1 h'")
    other = await connect(settings)
    async with other.transaction():
        assert await other.fetchval(alone)
        assert not await digest.index()
        assert not await digest.index_older()
        assert await connection.fetchval(COUNTED) == 0
    async with other.transaction():
        await other.execute("LOCK TABLE minute_stats IN EXCLUSIVE MODE")
        indexing = asyncio.create_task(digest.index())
        await until(
            lambda: connection.fetchval(
                "SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'minute_stats'::regclass"
            )
        )
        assert not await connection.fetchval(alone)
    await indexing
    await other.close()
    assert await connection.fetchval(alone)
    assert await connection.fetchval(COUNTED) == 3


async def test_one_process_walks_over_older_results_at_a_time(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    older = await add(connection, 2, ended=False)
    new = await add(connection)
    await connection.execute("UPDATE digest_state SET resumes_at = now() - interval '1 h'")
    other = await connect(settings)
    async with other.transaction():
        assert await other.fetchval("SELECT pg_try_advisory_xact_lock(hashtext('digest'), 1)")
        assert not await digest.index_older()
        await digest.index()
        assert await found(connection, "text") == list(new)
    await other.close()
    assert await digest.index_older()
    await digest.words.index()
    assert set(await found(connection, "text")) == {*older, *new}


@pytest.mark.trial
async def test_killed_processes_lose_and_double_nothing(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    for _ in range(8):
        await add(connection, 500)
    running: list[asyncio.subprocess.Process] = []
    for number in range(9):
        running.append(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.integration.results.indexing_process"),
                env=environment_of(settings),
            )
        )
        if number >= 2:
            counted = await connection.fetchval(COUNTED)
            await until(partial(connection.fetchval, f"SELECT ({COUNTED}) > $1", counted))
            running.pop(0).kill()
    for process in running:
        process.kill()
        await process.wait()
    assert await connection.fetchval(COUNTED) < 4000  # each was killed in the midst of its work

    async def is_done() -> bool:
        digest._place = 0
        await digest.index()
        return not await connection.fetchval("SELECT count(*) FROM undigested_results")

    await until(is_done)
    assert await connection.fetchval(COUNTED) == 4000
    assert await connection.fetchval("SELECT count(*) FROM result_search") == 4000
