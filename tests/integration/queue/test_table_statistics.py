"""Statistics of a small table: they follow its growth."""

import asyncpg
import pytest

from app.queue.table_statistics import analyze_growth
from tests.conftest import Service
from tests.integration.queue.queue_bench import Bench
from tests.integration.support import until

_KNOWN = "SELECT reltuples::int FROM pg_class WHERE oid = 'results'::regclass"
_PAGES = "SELECT pg_relation_size('results') / current_setting('block_size')::int"
_INSERT = """
INSERT INTO results (id, context_id, model_name, parameters, deadline_at)
SELECT uuidv7(), uuidv7(), 'm', '{}', now() FROM generate_series(1, $1)
"""
_REPORT = (
    "SELECT pg_stat_force_next_flush()"  # of rows that came and went, otherwise after a second
)


@pytest.fixture(autouse=True)
async def _without_autovacuum(connection: asyncpg.Connection) -> None:
    await connection.execute("ALTER TABLE results SET (autovacuum_enabled = off)")


async def known_rows(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval(_KNOWN))


async def test_the_first_rows_are_analysed(bench: Bench) -> None:
    await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) < 1
    await bench.add(3)
    await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) == 3
    await bench.add(2)
    await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) == 3


async def test_first_rows_in_a_page_of_former_ones_are_analysed(bench: Bench) -> None:
    await bench.add(1)
    await bench.connection.execute("SET session_replication_role = replica; DELETE FROM results")
    await bench.connection.execute("VACUUM (TRUNCATE off) results")
    assert await known_rows(bench.connection) == 0
    await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) == 0
    await bench.add(2)
    await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) == 2


async def test_a_table_is_analysed_at_each_multiple_of_its_pages(bench: Bench) -> None:
    sizes: list[int] = []
    while len(sizes) < 3:
        await bench.add(10)
        before = await known_rows(bench.connection)
        await bench.queue.analyze_growth()
        if await known_rows(bench.connection) > before:
            sizes.append(await bench.connection.fetchval(_PAGES))
    first, second, third = sizes
    assert first == 1
    assert 4 < second <= 6
    assert 4 * second < third < 5 * second


async def test_rows_in_pages_that_are_free_are_growth_too(bench: Bench) -> None:
    """As after retention has removed nearly all results, and before the next burst."""
    connection = bench.connection
    await connection.execute("SET session_replication_role = replica")
    await connection.execute(_INSERT, 400)
    await connection.execute(
        "DELETE FROM results WHERE id <> (SELECT id FROM results ORDER BY id DESC LIMIT 1)"
    )
    await connection.execute(_REPORT)
    await connection.execute("VACUUM (TRUNCATE off, ANALYZE) results")
    pages = await connection.fetchval(_PAGES)
    await connection.execute(_INSERT, 150)
    await connection.execute("UPDATE results SET priority = 1; UPDATE results SET priority = 0")
    await connection.execute(_REPORT)
    await bench.queue.analyze_growth()
    assert await known_rows(connection) == 1
    await connection.execute(_INSERT, 100)
    await connection.execute(_REPORT)
    assert await connection.fetchval(_PAGES) < 4 * pages
    await bench.queue.analyze_growth()
    assert await known_rows(connection) == 251


async def test_a_role_that_may_not_analyse_it_does_not_try(
    bench: Bench, connection: asyncpg.Connection
) -> None:
    await bench.add(1)
    await connection.execute("CREATE ROLE guest; GRANT SELECT ON results TO guest")
    try:
        warned: list[object] = []
        connection.add_log_listener(lambda _, message: warned.append(message))
        await connection.execute("SET ROLE guest")
        await analyze_growth(connection)
        assert warned == []
    finally:
        await connection.execute("RESET ROLE; DROP OWNED BY guest; DROP ROLE guest")


async def test_an_api_process_keeps_them(api: Service, connection: asyncpg.Connection) -> None:
    await connection.execute("SET session_replication_role = replica")
    await connection.execute(_INSERT, 3)

    async def is_analysed() -> bool:
        return await known_rows(connection) == 3

    await until(is_analysed)


async def test_a_table_that_is_being_vacuumed_is_left_alone(bench: Bench) -> None:
    await bench.add(1)
    async with bench.connection.transaction():
        await bench.connection.execute("LOCK TABLE results IN SHARE UPDATE EXCLUSIVE MODE")
        await bench.queue.analyze_growth()
    assert await known_rows(bench.connection) < 1
