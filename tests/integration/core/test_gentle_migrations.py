"""Migrations of a database in use: who reads and writes results goes on, and what breaks is resumed."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

import asyncpg
import pytest
from sqlalchemy.exc import SQLAlchemyError

from app.core.settings import Settings
from tests.conftest import connect, make_settings, migrate
from tests.integration.core.test_migrations import SCHEMA, migrating
from tests.integration.support import until
from tests.postgres import PostgresServer

NOT_VALID = """
SELECT (SELECT count(*) FROM pg_index WHERE NOT indisvalid)
  + (SELECT count(*) FROM pg_constraint WHERE NOT convalidated)
"""
BUILDING = "SELECT pid FROM pg_stat_progress_create_index WHERE datname = current_database()"
# Sessions that try to take the lock of migrations: again and again, each time in a transaction of
# its own, so that the last statement seen may be any of that transaction.
ASKING = """
SELECT pid FROM pg_stat_activity WHERE query ~* 'pg_try_advisory_lock|^begin|^commit'
  AND datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle in transaction'
  AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted)
"""
# Those that change tables which have grown.
REVISIONS = [(f"{number:04}", f"{number + 1:04}") for number in (*range(3, 8), 11, 28)]


@pytest.fixture
async def empty(postgres_server: PostgresServer) -> AsyncIterator[Settings]:
    """Settings of a database without any table."""
    name = f"test_{secrets.token_hex(6)}"
    await postgres_server.execute(f"CREATE DATABASE {name}")
    yield make_settings(postgres_server, name)
    await postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextlib.asynccontextmanager
async def transaction(settings: Settings, statement: str) -> AsyncIterator[asyncpg.Connection]:
    """Another session's open transaction, which has run a statement."""
    connection = await connect(settings)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.execute(statement)
            yield connection
    finally:
        await connection.close()


async def add_result(connection: asyncpg.Connection) -> None:
    identifier = secrets.token_hex(16)
    async with asyncio.timeout(30):
        await connection.execute(
            f"INSERT INTO contexts (id, content) VALUES ('{identifier}', 'x');"
            "INSERT INTO results (id, context_id, model_name, parameters, deadline_at)"
            f"VALUES ('{identifier}', '{identifier}', 'm', '{{}}', now())"
        )


async def schema_of(settings: Settings) -> list[str]:
    connection = await connect(settings)
    try:
        assert await connection.fetchval(NOT_VALID) == 0
        return [row[0] for row in await connection.fetch(SCHEMA)]
    finally:
        await connection.close()


@pytest.mark.parametrize(("before", "after"), REVISIONS)
async def test_results_are_written_while_an_index_is_built_and_broken_off(
    empty: Settings, before: str, after: str
) -> None:
    await asyncio.to_thread(migrate, empty, after)
    expected = await schema_of(empty)
    await asyncio.to_thread(lambda: migrate(empty, before, down=True))
    client = await connect(empty)
    await add_result(client)
    # A transaction older than the index: its building must wait for it.
    async with transaction(empty, "SELECT count(*) FROM workers"):
        migration = asyncio.create_task(asyncio.to_thread(migrate, empty, after))
        builder = await until(lambda: client.fetchval(BUILDING))
        await add_result(client)
        assert await client.fetchval("SELECT count(*) FROM results") == 2
        await client.execute("UPDATE results SET priority = 1")
        assert not migration.done()
        await until(lambda: client.fetchval(NOT_VALID))
        await client.execute("SELECT pg_terminate_backend($1)", builder)
        with pytest.raises(SQLAlchemyError):
            await migration
    assert await client.fetchval(NOT_VALID) > 0
    await asyncio.to_thread(migrate, empty, after)
    assert await schema_of(empty) == expected
    assert await client.fetchval("SELECT count(*) FROM results") == 2
    await client.close()


async def test_writers_do_not_queue_behind_a_migration_that_waits_for_a_reader(
    empty: Settings,
) -> None:
    await asyncio.to_thread(migrate, empty, "0003")
    client = await connect(empty)
    waiting = """SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'results'::regclass"""
    async with transaction(empty, "SELECT count(*) FROM results"):
        migration = asyncio.create_task(asyncio.to_thread(migrate, empty, "0004"))
        await until(lambda: client.fetchval(waiting))
        await add_result(client)
        assert not migration.done()
    await migration
    assert await schema_of(empty)
    await client.close()


@pytest.mark.trial
async def test_who_waits_to_migrate_too_does_not_hold_up_the_building_of_an_index(
    empty: Settings,
) -> None:
    await asyncio.to_thread(migrate, empty, "0003")
    client = await connect(empty)
    async with transaction(empty, "SELECT count(*) FROM workers"):
        first = asyncio.create_task(asyncio.to_thread(migrate, empty))
        await until(lambda: client.fetchval(BUILDING))
        second = await asyncio.to_thread(lambda: migrating(empty))
        await until(lambda: client.fetchval(ASKING))
    await first
    assert await asyncio.to_thread(second.wait, 60) == 0
    assert await schema_of(empty)
    await client.close()
