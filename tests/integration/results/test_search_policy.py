"""The search by words is a choice of the deployment, and of each team."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from alembic.util import CommandError

from app.core.database import Database
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer
from app.results.search_policy import Search, SearchPolicy
from tests.conftest import Service, migrate
from tests.integration.queue.test_limits import team
from tests.integration.results.test_indexer import COUNTED, add, found
from tests.integration.support import assert_problem


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    async with Database(settings, "test") as database:
        yield database


async def index_all(database: Database, settings: Settings, search: Search = "words") -> None:
    changed = settings.model_copy(update={"search": search})
    indexer = ResultIndexer(database, QueueDepth(database, settings), changed)
    while await indexer.index():
        pass


@pytest.mark.parametrize(
    ("setting", "has_words"), [("words", ["red", "green"]), ("off", ["green"])]
)
async def test_words_are_indexed_by_the_setting_and_by_the_team(
    database: Database, settings: Settings, connection: asyncpg.Connection,
    setting: Search, has_words: list[str],
) -> None:  # fmt: skip
    policy = SearchPolicy(database, settings)
    await policy.set("blue", "off")
    await policy.set("green", "words")
    ids = {name: (await add(connection, team=name))[0] for name in ("red", "green", "blue")}
    await index_all(database, settings, setting)
    assert await found(connection, "text") == [ids[name] for name in has_words]
    # Each is counted, and marked as counted: retention deletes no other.
    assert await connection.fetchval(COUNTED) == 3
    assert await connection.fetchval("SELECT count(*) FROM result_search") == 3
    assert await connection.fetchval("SELECT count(*) FROM undigested_results") == 0


@pytest.mark.parametrize("path", ["/results/?q=text", "/results/export?q=text"])
@pytest.mark.trial
async def test_a_search_without_words_names_what_turns_it_on(
    api: Service, settings: Settings, connection: asyncpg.Connection, path: str
) -> None:
    (result_id,) = await add(connection)
    await index_all(api.services.database, settings)
    assert str(result_id) in (await api.client.get(path)).text
    assert await team(settings, "search", "default", "off") == 0
    problem = assert_problem(await api.client.get(path), 422, "search_off", "query.q")
    assert "team search" in problem["detail"]
    assert (await api.client.get(path.split("?")[0])).status_code == 200
    assert await team(settings, "search", "default", "default") == 0
    for search in (api.services.results._search, api.services.export._search):
        search._policy.default = "off"
    problem = assert_problem(await api.client.get(path), 422, "search_off", "query.q")
    assert "LLM_SEARCH" in problem["detail"]
    # The team's own value replaces the setting's.
    assert await team(settings, "search", "default", "words") == 0
    assert str(result_id) in (await api.client.get(path)).text


@pytest.mark.trial
async def test_the_values_of_teams_are_listed(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await team(settings, "search", "red", "off") == 0
    assert await team(settings, "search", "green", "words") == 0
    assert await team(settings, "search", "red", "default") == 0
    assert await team(settings, "search", "red", "sometimes") == 2
    capfd.readouterr()
    assert await team(settings, "list") == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines[-2:] == [["team", "search"], ["green", "words"]]


def test_teams_whose_search_is_off_are_not_forgotten(settings: Settings) -> None:
    """Revision 0022, up and down: the former version would index their words."""

    async def store(search: Search) -> None:
        async with Database(settings, "test") as database:
            await SearchPolicy(database, settings).set("red", search)

    asyncio.run(store("off"))
    with pytest.raises(CommandError, match="search is off"):
        migrate(settings, "0021", down=True)
    asyncio.run(store("words"))
    migrate(settings, "0021", down=True)
    migrate(settings)
    asyncio.run(store("off"))
    migrate(settings, "0021", down=True, force=True)
