"""Sizes of stored texts that are known without reading them, and the charges of reads."""

from functools import partial
from typing import Any

import asyncpg
import pytest

from app.core.errors import NotFoundError
from app.core.settings import Settings
from app.results import store
from app.results.search_words import CHARACTERS
from app.results.sizes import json_bytes, text_bytes
from app.results.stats import system
from app.results.store import ResultStore
from app.results.word_indexer import TEXT_SIZE
from tests.integration.queue.queue_bench import open_bench

MILLION = 1_000_000


async def test_the_size_of_compressed_json_has_a_bound(connection: asyncpg.Connection) -> None:
    """As stored if it is not compressed; otherwise at most a hundred times that, or as usual."""
    await connection.execute("CREATE TEMP TABLE texts (place int, value jsonb, words text)")
    await connection.execute("""
        INSERT INTO texts VALUES
          (1, NULL, NULL), (2, '"short"', 'é'),
          (3, to_jsonb(repeat('x', 10000)), ''),
          (4, to_jsonb(repeat('x', 7000000)), '')
        """)
    await connection.execute("""
        INSERT INTO texts SELECT 5, to_jsonb(string_agg(repeat(md5(i::text), 2), '')), ''
        FROM generate_series(1, 40000) i
        """)
    rows = await connection.fetch(
        f"""SELECT pg_column_size(value) AS stored, {json_bytes("value")} AS size,
              {text_bytes("words")} AS words FROM texts ORDER BY place"""
    )
    stored = [row["stored"] for row in rows]
    assert [row["words"] for row in rows] == [0, 2, 0, 0, 0]
    assert stored[2] < 1_000
    assert 40_000 < stored[3] < MILLION
    assert stored[4] > MILLION
    sizes = [row["size"] for row in rows]
    assert sizes == [0, stored[1], 100 * stored[2], 4 * MILLION, 4 * stored[4]]


async def test_a_short_result_is_charged_nothing_and_a_request_by_its_texts(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, connection: asyncpg.Connection
) -> None:
    charged: list[int] = []

    async def read(size: int, fetch: partial[Any], _loaded: object) -> tuple[Any, int]:
        charged.append(size)
        return await fetch(), 0

    monkeypatch.setattr(store, "read_within", read)
    async with open_bench(settings) as bench:
        results = ResultStore(bench.database, bench.queue, settings)
        own, other = [(await bench.add(prompt="é" * 10))[0] for _ in range(2)]
        await connection.execute("UPDATE results SET output = 'abc' WHERE id = $1", own)
        await connection.execute("UPDATE results SET team_id = 'blue' WHERE id = $1", other)
        _, charge = await results.get_charged("default", own)
        assert (charge, charged) == (0, [])
        request = await results.request("default", own)
        assert (request.id, request.prompt, charged) == (own, "é" * 10, [23])
        for read_one in (results.request, results.get_charged):
            with pytest.raises(NotFoundError):
                await read_one("default", other)
        assert charged == [23, 0]
        await connection.execute("UPDATE results SET output = repeat('x', 40000)")
        await results.get_charged("default", own)
        assert charged[2] >= 40_000


async def test_a_text_to_be_indexed_counts_up_to_the_part_that_is_searched(
    connection: asyncpg.Connection,
) -> None:
    """Messages count as they are stored, compressed ones as the longest text; an absent text counts nothing."""
    most = CHARACTERS
    await connection.execute(
        "CREATE TEMPORARY TABLE texts (output text, error_message text, content text, messages jsonb)"
    )
    sizes = []
    for output, content, messages in (
        (None, None, None), (5, 7, None), (most + 1, 7, None), (5, most + 1, None), (5, None, 100),
        (5, None, 10_000),
    ):  # fmt: skip
        await connection.execute(
            """INSERT INTO texts (output, content, messages)
               SELECT repeat('x', $1), repeat('x', $2), to_jsonb(repeat('x', $3))""",
            *(output, content, messages),
        )
        row = await connection.fetchrow(f"SELECT {TEXT_SIZE} AS size FROM texts r, texts c")
        await connection.execute("DELETE FROM texts")
        assert row is not None
        sizes.append(row["size"])
    assert sizes == [0, 12, most + 7, most + 5, 5 + 109, most + 5]


async def test_the_rows_of_a_table_are_estimated_once_it_was_analyzed(
    connection: asyncpg.Connection,
) -> None:
    await connection.execute("CREATE TABLE analyzed (x int)")
    await connection.execute("CREATE TABLE fresh (x int)")
    await connection.execute("ANALYZE analyzed")
    rows = await connection.fetch(system._TABLES)
    found = {row["name"]: row["rows_estimate"] for row in rows}
    assert (found["analyzed"], found["fresh"]) == (0, None)
    sizes = [row["size_bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
