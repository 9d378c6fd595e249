"""Reads of one team: each of the store's statements leaves another team's results out."""

from uuid import UUID

import asyncpg
import pytest

from app.core.errors import NotFoundError
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.pages import ResultFilter
from app.results.store import ResultStore
from tests.integration.queue.queue_bench import open_bench

CHUNK = """
INSERT INTO result_chunks (result_id, attempt, "offset", text) VALUES ($1, $2, $3, $4)
"""


async def test_the_text_so_far_is_that_of_the_team_and_of_the_present_text(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with open_bench(settings) as bench:
        store = ResultStore(bench.database, bench.queue, settings)
        restarted, continued, silent = await bench.add(3)
        for result, text_attempt in ((restarted, None), (continued, 1)):
            await connection.execute(
                "UPDATE results SET attempt = 2, text_attempt = $2 WHERE id = $1",
                *(result, text_attempt),
            )
            for chunk in ((1, 0, "ab"), (2, 2, "cd"), (2, 4, "ef"), (3, 6, "later")):
                await connection.execute(CHUNK, result, *chunk)
        assert await store.partial_output("default", restarted) == "cdef"
        assert await store.partial_output("default", continued) == "abcdef"
        assert await store.partial_output("default", silent) == ""
        assert await store.partial_output("default", new_id()) == ""
        assert await store.partial_output("blue", continued) == ""


async def test_a_team_reads_attempts_groups_and_lists_of_its_own(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with open_bench(settings) as bench:
        store = ResultStore(bench.database, bench.queue, settings)
        own, other = [(await bench.add())[0] for _ in range(2)]
        await connection.execute("UPDATE results SET group_id = $1", own)
        await connection.execute("UPDATE results SET team_id = 'blue' WHERE id = $1", other)
        assert (await store.attempts("default", own)).attempt == 0
        with pytest.raises(NotFoundError):
            await store.attempts("default", other)
        assert [row.id for row in await store.group("default", own)] == [own]
        assert await store.group("default", new_id()) == []
        for full in (True, False):
            page = await store.list(
                "default", ResultFilter(), after=None, limit=9, full=full, prompts=full
            )
            assert [one.row.id for one in page.rows] == [own]
            assert page.following is None
            assert page.rows[0].prompt_start == ("a prompt" if full else None)


async def test_the_newest_attribution_of_a_text_is_that_of_its_team_and_index(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with open_bench(settings) as bench:
        store = ResultStore(bench.database, bench.queue, settings)
        source, another = await bench.add(2)
        found: list[UUID] = []
        for of, index in (
            (source, "x"),
            (source, "x"),
            (another, "x"),
            (source, "y"),
            (source, "x"),
        ):
            (one,) = await bench.add(kind="attribution", source_id=source, model_name=index)
            await connection.execute("UPDATE results SET source_id = $2 WHERE id = $1", *(one, of))
            found.append(one)
        await connection.execute("UPDATE results SET team_id = 'blue' WHERE id = $1", found[4])
        newest = await store.newest_about("default", source, "x")
        assert newest is not None
        assert newest.id == found[1]
        assert await store.newest_about("default", source, "z") is None
