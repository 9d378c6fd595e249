"""Statistics of a new table: made with its first rows, once."""

from tests.integration.queue.queue_bench import Bench

_ROWS = "SELECT reltuples FROM pg_class WHERE oid = 'results'::regclass"


async def test_the_first_rows_are_analysed(bench: Bench) -> None:
    assert not await bench.queue.analyze_first_rows()
    assert await bench.connection.fetchval(_ROWS) < 1
    await bench.add(3)
    assert not await bench.queue.analyze_first_rows()
    assert await bench.connection.fetchval(_ROWS) == 3
    await bench.add(2)
    assert await bench.queue.analyze_first_rows()
    assert await bench.connection.fetchval(_ROWS) == 3


async def test_a_table_that_is_being_vacuumed_is_left_alone(bench: Bench) -> None:
    await bench.add(1)
    async with bench.connection.transaction():
        await bench.connection.execute("LOCK TABLE results IN SHARE UPDATE EXCLUSIVE MODE")
        assert not await bench.queue.analyze_first_rows()
    assert await bench.connection.fetchval(_ROWS) < 1
