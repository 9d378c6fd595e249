"""Statistics of a small table: they follow its growth."""

import asyncpg
import pytest

from app.queue import table_statistics
from tests.integration.queue.queue_bench import Bench

_KNOWN = "SELECT reltuples::int FROM pg_class WHERE oid = 'results'::regclass"
_PAGES = "SELECT pg_relation_size('results') / current_setting('block_size')::int"


async def known_rows(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval(_KNOWN))


async def test_the_first_rows_are_analysed(bench: Bench) -> None:
    assert not await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) < 1
    await bench.add(3)
    assert not await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) == 3
    await bench.add(2)
    assert not await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) == 3


async def test_first_rows_in_a_page_of_former_ones_are_analysed(bench: Bench) -> None:
    await bench.add(1)
    await bench.connection.execute("SET session_replication_role = replica; DELETE FROM results")
    await bench.connection.execute("VACUUM (TRUNCATE off) results")
    assert await known_rows(bench.connection) == 0
    assert not await bench.queue.analyze_growth()
    await bench.add(2)
    assert not await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) == 2


async def test_a_table_is_analysed_at_each_multiple_of_its_size_until_it_is_large(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = f"relpages >= {table_statistics._LARGE_PAGES}"
    assert large in table_statistics._STATE
    state = table_statistics._STATE.replace(large, "relpages >= 20")
    monkeypatch.setattr(table_statistics, "_STATE", state)
    sizes = []
    for _ in range(200):
        await bench.add(10)
        before = await known_rows(bench.connection)
        if await bench.queue.analyze_growth():
            break
        if await known_rows(bench.connection) > before:
            sizes.append(await bench.connection.fetchval(_PAGES))
    first, second, third = sizes
    assert first == 1
    assert 4 < second <= 6
    assert 4 * second < third < 5 * second


async def test_a_table_that_is_being_vacuumed_is_left_alone(bench: Bench) -> None:
    await bench.add(1)
    async with bench.connection.transaction():
        await bench.connection.execute("LOCK TABLE results IN SHARE UPDATE EXCLUSIVE MODE")
        assert not await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) < 1
