"""Statements of erasure, one by one: only ended results that are not to be stored lose their texts."""

from uuid import UUID

import asyncpg

from app.core.ids import new_id
from app.results.retention import erasure

INSERT = """
INSERT INTO results (id, context_id, model_name, parameters, deadline_at, state, finished_at, output,
                     store, erased_at, prompt, request, logprobs)
VALUES ($1, $2, 'm', '{}', now(), $3::text,
        CASE WHEN $3::text = 'completed' THEN now() - make_interval(secs => $5) END,
        CASE WHEN $3::text = 'completed' THEN 'text' END, $4, NULL, 'prompt', '{}', '[1]')
"""


async def context(connection: asyncpg.Connection) -> UUID:
    identifier = new_id()
    await connection.execute("INSERT INTO contexts (id, content) VALUES ($1, 'text')", identifier)
    return identifier


async def result(
    connection: asyncpg.Connection,
    of: UUID,
    *,
    state: str = "completed",
    store: bool = False,
    age: float = 0.0,
) -> UUID:
    identifier = new_id()
    await connection.execute(INSERT, identifier, of, state, store, age)
    return identifier


async def erased(connection: asyncpg.Connection, table: str) -> set[UUID]:
    rows = await connection.fetch(f"SELECT id FROM {table} WHERE erased_at IS NOT NULL")
    return {row["id"] for row in rows}


async def test_results_that_may_be_erased(connection: asyncpg.Connection) -> None:
    """By their ids, or all that ended an hour ago: the oldest first."""
    of = await context(connection)
    older, old = [await result(connection, of, age=age) for age in (8_000, 4_000)]
    young = await result(connection, of, age=3_000)
    stored = await result(connection, of, store=True, age=4_000)
    pending = await result(connection, of, state="pending")
    done = await result(connection, of, age=4_000)
    await connection.execute("UPDATE results SET erased_at = now() WHERE id = $1", done)
    ids = [older, old, stored, pending, done]
    delivered = await connection.fetch(erasure._DELIVERED, ids)
    assert {row["id"] for row in delivered} == {older, old}
    overdue = await connection.fetch(erasure._OLD, 3_600.0)
    assert [row["id"] for row in overdue] == [older, old]
    assert young not in ids


async def test_texts_are_erased_of_locked_contexts_alone(connection: asyncpg.Connection) -> None:
    """A result that changed since it was read, or whose context another one holds, is left."""
    locked, other = await context(connection), await context(connection)
    gone = await result(connection, locked)
    stored = await result(connection, locked, store=True)
    pending = await result(connection, locked, state="pending")
    unnamed = await result(connection, locked)
    elsewhere = await result(connection, other)
    named = [gone, stored, pending, elsewhere]
    await connection.execute(erasure._ERASE, [locked], named)
    assert await erased(connection, "results") == {gone}
    row = await connection.fetchrow("SELECT * FROM results WHERE id = $1", gone)
    assert row is not None
    # A rendered prompt becomes empty: its result is a chat still, for the metrics.
    assert row["prompt"] == ""
    assert [row[name] for name in ("output", "logprobs", "request")] == [None] * 3
    assert await erased(connection, "contexts") == set()
    assert unnamed not in named


async def test_a_context_is_erased_with_the_last_of_its_results(
    connection: asyncpg.Connection,
) -> None:
    last, shared, past = [await context(connection) for _ in range(3)]
    before = await result(connection, last)
    await connection.execute("UPDATE results SET erased_at = now() WHERE id = $1", before)
    gone = [await result(connection, of) for of in (last, shared, past)]
    await result(connection, shared, store=True)
    await connection.execute(
        "UPDATE contexts SET erased_at = now() - interval '1 d' WHERE id = $1", past
    )
    unnamed = await context(connection)
    await connection.execute(erasure._ERASE, [last, shared, past], gone)
    rows = await connection.fetch(
        "SELECT id, content, erased_at < now() - interval '1 h' AS is_old FROM contexts"
    )
    found = {row["id"]: (row["content"], row["is_old"]) for row in rows}
    assert found == {
        last: ("", False), shared: ("text", None), past: ("text", True), unnamed: ("text", None),
    }  # fmt: skip


async def test_the_words_of_other_results_are_kept(connection: asyncpg.Connection) -> None:
    of = await context(connection)
    gone, kept = await result(connection, of), await result(connection, of)
    for identifier in (gone, kept):
        await connection.execute(
            "INSERT INTO result_search VALUES ($1, 'default', to_tsvector('simple', 'word'))",
            identifier,
        )
    assert await connection.execute(erasure._FORGET_WORDS, [gone]) == "UPDATE 1"
    assert await connection.execute(erasure._FORGET_WORDS, [gone]) == "UPDATE 0"
    rows = await connection.fetch("SELECT result_id FROM result_search WHERE words IS NOT NULL")
    assert [row["result_id"] for row in rows] == [kept]
