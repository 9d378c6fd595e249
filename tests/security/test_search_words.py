"""An attack on the search: texts on which PostgreSQL's parser is slow, sent by one team."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer
from tests.integration.results.test_indexer import COUNTED, add, found

SLOW = ["a_", "~/", "<!--", "./", "an_innocent_long_name_"]


@pytest.fixture
async def indexer(settings: Settings) -> AsyncIterator[ResultIndexer]:
    async with Database(settings, "test") as database:
        yield ResultIndexer(database, QueueDepth(database, settings), settings)


async def test_one_teams_texts_stop_no_ledger_and_no_search_of_another(
    connection: asyncpg.Connection, indexer: ResultIndexer
) -> None:
    """Each takes the parser alone 10 s and more, with its 30,000 characters."""
    for unit in SLOW:
        await add(connection, team="hostile", prompt=(unit * 30_000)[:30_000])
        await add(connection, team="polite", output="fine weather")
    while await indexer.index():
        pass
    assert await connection.fetchval(COUNTED) == 2 * len(SLOW)
    assert await connection.fetchval("SELECT sum(results) FROM usage_entries") == 2 * len(SLOW)
    assert len(await found(connection, "weather")) == len(SLOW)
    assert len(await found(connection, "text")) == len(SLOW)
    assert len(await found(connection, "innocent")) == 1
