"""States that PostgreSQL's statistics and a session's plans may be in while many results wait."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import asyncpg

from app.queue.job_queue import JobQueue
from tests.conftest import connect, make_settings
from tests.database_copies import own_database
from tests.integration.queue.plans.explaining import ExplainingDatabase
from tests.integration.queue.plans.full_queue import (
    TABLES,
    WITHOUT_AUTOVACUUM,
    fill_ended,
    fill_waiting,
    find_ids,
)
from tests.integration.queue.plans.hot_list_statements import HOT_LIST_STATEMENTS
from tests.integration.queue.plans.hot_statements import HOT_STATEMENTS, Queue
from tests.postgres import PostgresServer

ENDED = WAITING = 100_000
BURST = 20_000  # results that come after a session has made its plans

_ANALYZE = f"ANALYZE {', '.join(TABLES)}"
_VACUUM = f"VACUUM {', '.join(TABLES)}"
# Sizes of tables and indexes, as PostgreSQL has recorded them.
_SIZES = f"""
SELECT c.relname, c.relpages, c.reltuples FROM pg_class c
WHERE c.oid = ANY(ARRAY{list(TABLES)}::regclass[])
  OR c.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = ANY(ARRAY{list(TABLES)}::regclass[]))
"""
_SIZES_OF_QUEUES = """
SELECT c.relname FROM pg_class c LEFT JOIN pg_index i ON i.indexrelid = c.oid
WHERE c.relname IN ('result_chunks', 'undigested_results')
  OR i.indrelid IN ('result_chunks'::regclass, 'undigested_results'::regclass)
  OR i.indrelid IN ('results'::regclass, 'webhook_deliveries'::regclass, 'batches'::regclass)
    AND pg_get_expr(i.indpred, i.indrelid) LIKE '%state%'
"""
_RECORD = """
SELECT pg_restore_relation_stats('schemaname', 'public', 'relname', name, 'relpages', pages,
  'reltuples', tuples) FROM unnest($1::text[], $2::int[], $3::real[]) AS r(name, pages, tuples)
"""
_FORGET = f"""
DELETE FROM pg_statistic WHERE starelid = ANY(ARRAY{list(TABLES)}::regclass[]);
SELECT pg_clear_relation_stats('public', relname) FROM ({_SIZES}) s
"""
_END_ALL = """
SET session_replication_role = replica;
DELETE FROM results WHERE state = 'pending' AND worker_id IS NULL AND team_id = 'red';
UPDATE results SET state = 'completed', output = 'x', finished_at = now(), worker_id = uuidv7()
WHERE state = 'pending' AND worker_id IS NULL
"""

Sizes = Sequence[tuple[str, int, float]]
Change = Callable[[asyncpg.Connection, "Databases"], Awaitable[None]]


@dataclass(slots=True, frozen=True)
class Databases:
    """Databases to copy from, and the sizes that PostgreSQL recorded of empty tables."""

    server: PostgresServer
    empty: str
    idle: str  # many results have ended, and none waits; analysed
    full: str  # and then many came
    analyzed_empty: Sizes
    vacuumed_empty: Sizes


@contextlib.asynccontextmanager
async def full_databases(server: PostgresServer, template: str) -> AsyncIterator[Databases]:
    async with contextlib.AsyncExitStack() as stack:
        idle = await stack.enter_async_context(own_database(server, template))
        async with _connected(server, idle) as connection:
            await connection.execute(WITHOUT_AUTOVACUUM)
            await connection.execute(_ANALYZE)
            analyzed = await _sizes(connection)
            await connection.execute(_VACUUM)
            vacuumed = await _sizes(connection)
            await fill_ended(connection, ENDED)
            await connection.execute(_ANALYZE)
        full = await stack.enter_async_context(own_database(server, idle))
        async with _connected(server, full) as connection:
            await fill_waiting(connection, WAITING)
        yield Databases(server, template, idle, full, analyzed, vacuumed)


@dataclass(slots=True, frozen=True)
class State:
    """`change` makes it of a copy of a database.

    `is_planned`: the session makes its plans, then many results come, and maintenance looks.
    """

    name: str
    source: str
    change: Change
    is_planned: bool = False
    # Entries of rows that no longer wait, in the queue's indexes: each probe walks over them.
    has_dead_entries: bool = False
    knows_sizes: bool = True  # else the plans are for tables of some rows


@contextlib.asynccontextmanager
async def queue_in(state: State, databases: Databases) -> AsyncIterator[Queue]:
    server = databases.server
    async with own_database(server, getattr(databases, state.source)) as name:
        settings = make_settings(server, name)
        async with _connected(server, name) as connection:
            await connection.execute(WITHOUT_AUTOVACUUM)
            await state.change(connection, databases)
            async with ExplainingDatabase(settings) as database:
                if state.is_planned:
                    await _make_plans(Queue(database, settings, await find_ids(connection)))
                    await fill_waiting(connection, BURST)
                    await JobQueue(database, settings).analyze_growth()
                yield Queue(database, settings, await find_ids(connection))


async def _make_plans(queue: Queue) -> None:
    for statement in (*HOT_STATEMENTS, *HOT_LIST_STATEMENTS):
        async with queue.database.undone():
            await statement.run(queue)


@contextlib.asynccontextmanager
async def _connected(server: PostgresServer, name: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await connect(make_settings(server, name))
    try:
        yield connection
    finally:
        await connection.close()


async def _sizes(connection: asyncpg.Connection) -> Sizes:
    return [tuple(row) for row in await connection.fetch(_SIZES)]


def _recorded(sizes: Callable[[Databases], Sizes]) -> Change:
    """No statistics but these sizes."""

    async def change(connection: asyncpg.Connection, databases: Databases) -> None:
        await connection.execute(_FORGET)
        await connection.execute(_RECORD, *map(list, zip(*sizes(databases), strict=True)))

    return change


def _same(pages: int, tuples: float) -> Callable[[Databases], Sizes]:
    return lambda databases: [(name, pages, tuples) for name, _, _ in databases.analyzed_empty]


def _executed(*statements: str) -> Change:
    async def change(connection: asyncpg.Connection, _: Databases) -> None:
        for statement in statements:
            await connection.execute(statement)

    return change


def _first_rows(count: int) -> Change:
    """So many results have ended, and were analysed."""

    async def change(connection: asyncpg.Connection, _: Databases) -> None:
        await fill_ended(connection, count)
        await connection.execute(_ANALYZE)

    return change


async def _vacuumed_queues(connection: asyncpg.Connection, _: Databases) -> None:
    """VACUUM leaves the pages of an emptied queue, and records that no row is in them."""
    queues = [row["relname"] for row in await connection.fetch(_SIZES_OF_QUEUES)]
    await connection.execute(_RECORD, queues, [100] * len(queues), [0.0] * len(queues))


_Unsized = partial(State, knows_sizes=False)

STATES: Sequence[State] = (
    _Unsized("never analysed", "full", _executed(_FORGET)),
    _Unsized("analysed while empty", "full", _recorded(lambda databases: databases.analyzed_empty)),
    _Unsized("vacuumed while empty", "full", _recorded(lambda databases: databases.vacuumed_empty)),
    State("analysed while idle", "full", _executed()),
    State("vacuumed since", "full", _executed(_VACUUM)),
    State("analysed while full", "full", _executed(_ANALYZE)),
    State("ended since", "full", _executed(_ANALYZE, _END_ALL), has_dead_entries=True),
    State("ended and vacuumed since", "full", _executed(_ANALYZE, _END_ALL, _VACUUM)),
    _Unsized("recorded as one row", "full", _recorded(_same(1, 1.0))),
    State("queues vacuumed while empty", "full", _vacuumed_queues),
    State("recorded as a billion rows", "full", _recorded(_same(10_000_000, 1e9))),
    State("planned while empty", "empty", _executed(), is_planned=True),
    State("planned while empty, analysed", "empty", _executed(_ANALYZE), is_planned=True),
    State("planned with one row, analysed", "empty", _first_rows(1), is_planned=True),
    State("planned with forty rows, analysed", "empty", _first_rows(40), is_planned=True),
    State("planned while idle", "idle", _executed(), is_planned=True),
)
