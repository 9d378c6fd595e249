"""Statements of retention, one by one: rows that a pass leaves alone, although it has read them."""

from datetime import timedelta

import asyncpg
import pytest

from app.core.ids import lowest_id, new_id
from app.core.settings import Settings
from app.results.retention import cleanup, sql
from tests.conftest import connect
from tests.integration.results.test_retention import DAY, HOUR, House, look


@pytest.fixture
async def rows(connection: asyncpg.Connection) -> House:
    return House(connection, await connection.fetchval("SELECT now()"))


async def test_results_that_are_pending_are_not_deleted(rows: House) -> None:
    """An attribution of a result, or a result itself, that began after the pass had read."""
    source = await rows.result(age=DAY)
    ended = await rows.result(age=DAY, kind="attribution", source=source)
    running = await rows.result(age=DAY, kind="attribution", source=source, state="pending")
    pending = await rows.result(age=DAY, state="pending")
    other = await rows.result(age=DAY)
    locked = await rows.connection.fetch(sql.LOCK_RESULTS, [source, pending])
    ids = [row["id"] for row in locked]
    gone = await rows.connection.fetch(sql.DELETE_RESULTS, ids)
    assert len(gone) == 2
    assert await rows.left() == {running, pending, other}
    assert ended != source


async def test_a_context_with_a_result_is_not_deleted(rows: House) -> None:
    used, empty = await rows.context(), await rows.context()
    await rows.result(used, age=DAY)
    deleted = await rows.connection.fetch(sql.DELETE_CONTEXTS, [used, empty])
    assert [row["id"] for row in deleted] == [empty]
    assert await rows.left("contexts") == {used}


async def test_the_time_of_an_unused_context_only_moves_on(rows: House) -> None:
    context, other = await rows.context(), await rows.context()
    for days in (3, 1, 2):
        at = rows.now - timedelta(days=days)
        await rows.connection.execute(sql.MARK_UNUSED, [context], [at])
    found = await rows.connection.fetch("SELECT id, unused_since FROM contexts")
    assert {row["id"]: row["unused_since"] for row in found} == {
        context: rows.now - timedelta(days=1), other: None,
    }  # fmt: skip


async def test_a_locked_record_is_left_to_a_later_cleanup(settings: Settings, rows: House) -> None:
    """The statement waits for no other transaction."""
    locked, free = new_id(), new_id()
    for identifier in (locked, free):
        await rows.connection.execute(
            """INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)
               VALUES ($1, 'h', 1, now(), $2)""",
            *(identifier, rows.now),
        )
    cleaning = await connect(settings)
    await cleaning.execute("SET lock_timeout = '20s'")
    async with rows.connection.transaction():
        await rows.connection.execute("SELECT FROM workers WHERE id = $1 FOR UPDATE", locked)
        assert await cleaning.execute(cleanup._WORKERS, rows.now, 9) == "DELETE 1"
    await cleaning.close()
    assert await rows.left("workers") == {locked}


async def test_only_remains_of_a_rebuilt_index_of_words_are_broken(rows: House) -> None:
    """Other tables, valid indexes and indexes of other names are left alone."""
    for name, columns, is_valid in (
        ("ix_result_search_words_ccnew", "result_search (team_id)", False),
        ("ix_result_search_words_ccold", "result_search (team_id)", True),
        ("ix_result_search_words_cc_of_contexts", "contexts (team_id)", False),
        ("ix_result_search_others_ccnew", "result_search (team_id)", False),
    ):
        await rows.connection.execute(f"CREATE INDEX {name} ON {columns}")
        await rows.connection.execute(
            f"UPDATE pg_index SET indisvalid = $1 WHERE indexrelid = '{name}'::regclass", is_valid
        )
    broken = await rows.connection.fetch(sql.BROKEN_WORDS)
    assert [row["name"] for row in broken] == ["ix_result_search_words_ccnew"]


async def test_retention_deletes_no_file_of_another_team(rows: House) -> None:
    """A batch that names such a file changes nothing."""
    own, foreign, unused, recent = (new_id() for _ in range(4))
    for identifier, team in ((own, "red"), (foreign, "blue"), (unused, "red"), (recent, "red")):
        await rows.connection.execute(
            """INSERT INTO files (id, team_id, purpose, filename, size)
               VALUES ($1, $2, 'batch', 'f', 1)""",
            *(identifier, team),
        )
    cutoff = rows.now - timedelta(seconds=HOUR)
    batches = [
        (own, "red", cutoff), (foreign, "red", cutoff), (unused, "blue", cutoff),
        (recent, "red", cutoff + timedelta(microseconds=1)),
    ]  # fmt: skip
    for file, team, ended_at in batches:
        await rows.connection.execute(
            """INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state,
                 expires_at, ended_at) VALUES ($1, $2, 'x', $3, '24h', 'completed', now(), $4)""",
            *(rows.id_of(DAY), team, file, ended_at),
        )
    arguments = "red", cutoff, lowest_id(cutoff)
    old = await rows.connection.fetch(sql.OLD_BATCHES, *arguments, 9)
    assert {row["input_file_id"] for row in old} == {own, foreign}
    assert len(await rows.connection.fetch(sql.OLD_BATCHES, *arguments, 1)) == 1
    gone = await rows.connection.fetch(sql.DELETE_INPUTS, *arguments, 9)
    assert [row["id"] for row in gone] == [own]
    assert await rows.left("files") == {foreign, unused, recent}
    await rows.connection.execute(sql.DELETE_FILES, [foreign, recent], "red")
    assert await rows.left("files") == {foreign, unused}


async def test_an_input_file_expires_with_its_last_batch_of_its_team(rows: House) -> None:
    free, used, foreign = (new_id() for _ in range(3))
    soon, late = (rows.now + timedelta(days=days) for days in (1, 2))
    for identifier, team in ((free, "red"), (used, "red"), (foreign, "blue")):
        await rows.connection.execute(
            """INSERT INTO files (id, team_id, purpose, filename, size)
               VALUES ($1, $2, 'batch', 'f', 1)""",
            *(identifier, team),
        )
    await rows.connection.execute(
        """INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state,
             expires_at) VALUES ($1, 'red', 'x', $2, '24h', 'in_progress', now())""",
        *(new_id(), used),
    )
    for at in (late, soon, late):
        files = [free, used, foreign]
        await rows.connection.execute(sql.EXPIRE_INPUTS, files, [at] * 3, "red")
    found = await rows.connection.fetch("SELECT id, expires_at FROM files")
    times = {row["id"]: row["expires_at"] for row in found}
    assert times == {free: soon, used: None, foreign: None}


@pytest.mark.parametrize("kind", ["embedding", "score"])
async def test_the_text_of_a_vector_goes_with_the_prompts(
    settings: Settings, rows: House, kind: str
) -> None:
    result = await rows.result(age=2 * DAY, kind=kind)
    vector = b"\x00\x00\x80?"
    await rows.connection.execute("UPDATE results SET output = '', vector = $1", vector)
    await look(settings, prompts=DAY)
    (row,) = await rows.connection.fetch("SELECT id, prompt, vector FROM results")
    assert tuple(row) == (result, None, vector)
    assert await rows.connection.fetchval("SELECT content FROM contexts") == ""
    await look(settings, results=DAY)
    assert await rows.left() == set()
