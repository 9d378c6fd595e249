"""A search beyond the rows that are walked: the index of words obeys every filter."""

from uuid import UUID

import asyncpg
import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.results import search
from app.results.pages import ResultFilter
from app.results.search import ResultSearch, team_word
from app.results.search_policy import SearchPolicy
from tests.integration.results.test_retention import DAY, House


async def test_the_index_of_words_obeys_filters_teams_and_the_last_id(
    settings: Settings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_WALKS", (1,))  # rows; the index finds the rest
    rows = House(connection, await connection.fetchval("SELECT now()"))
    found: list[UUID] = []
    for age, team, state, words in (
        (1, "default", "completed", "quaint"),
        (2, "default", "completed", "quaint"),
        (3, "default", "failed", "quaint"),
        (4, "blue", "completed", "quaint"),
        (5, "default", "completed", "plain"),
        (6, "default", "completed", "quaint"),
    ):
        one = await rows.result(age=age * DAY, team=team, state=state, counted=False)
        found.append(one)
        await connection.execute(
            """INSERT INTO result_search VALUES ($1, $2,
                 to_tsvector('simple', $3) || array_to_tsvector(ARRAY[$4]))""",
            *(one, team, words, team_word(team)),
        )
    async with Database(settings, "test") as database:
        index = ResultSearch(database, SearchPolicy(database, settings))

        async def ids(limit: int, after: UUID | None = None, **filters: str) -> list[UUID]:
            narrowed = ResultFilter(words="quaint", **filters)  # type: ignore[arg-type]
            return list(await index.ids("default", narrowed, after=after, limit=limit))

        assert await ids(9) == [found[0], found[1], found[2], found[5]]
        assert await ids(9, state="completed") == [found[0], found[1], found[5]]
        assert await ids(9, state="failed") == [found[2]]
        assert await ids(9, model_name="other") == []
        assert await ids(3) == found[:3]
        assert await ids(9, after=found[0]) == [found[1], found[2], found[5]]
