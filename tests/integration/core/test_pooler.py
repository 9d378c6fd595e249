"""The service's connections through a real PgBouncer that pools transactions."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from app.cli.doctor.command import examine
from app.cli.doctor.findings import Finding, Level
from app.cli.startup import schema_fits
from app.core.database import Database
from app.core.migration_engine import make_engine
from app.core.pooler import PoolerError, session_settings
from app.core.settings import Settings
from tests.pgbouncer import CONNECTIONS, PgBouncer, set_role
from tests.postgres import PostgresServer

pytestmark = pytest.mark.trial


class Behind(NamedTuple):
    """PgBouncer, and settings that name it and PostgreSQL."""

    bouncer: PgBouncer
    settings: Settings


@pytest.fixture
async def behind(
    settings: Settings, postgres_server: PostgresServer, tmp_path: Path
) -> AsyncIterator[Behind]:
    bouncer = PgBouncer(tmp_path, postgres_server)
    await bouncer.start()
    direct = settings.database_host
    changes = {"database_host": bouncer.address, "database_listener": direct}
    yield Behind(bouncer, settings.model_copy(update=changes))
    await bouncer.stop()


async def fits(settings: Settings) -> bool:
    """The check before a start, which runs a loop of its own."""
    return await asyncio.to_thread(schema_fits, settings)


def of_pooler(findings: list[Finding]) -> list[tuple[Level, str]]:
    return [(one.level, f"{one.found}: {one.to_do}") for one in findings if one.part == "pgbouncer"]


async def test_a_role_without_the_settings_is_refused_with_the_commands(
    behind: Behind, postgres_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the sentence are enough."""
    assert not await fits(behind.settings)
    sentence = capsys.readouterr().err
    assert "jit is on" in sentence
    (level, found), *_ = of_pooler(await examine(behind.settings))
    assert level is Level.FAIL
    assert "ALTER ROLE" in found
    for command in sentence.split("`")[1].split(";")[:-1]:
        await postgres_server.execute(command)
    await behind.bouncer.console(postgres_server, "RECONNECT")
    assert await fits(behind.settings), capsys.readouterr().err


async def test_a_time_out_that_was_changed_since(
    behind: Behind, postgres_server: PostgresServer
) -> None:
    await set_role(postgres_server, behind.settings)
    longer = behind.settings.model_copy(update={"database_timeout_seconds": 90.5})
    async with Database(longer, "test") as database:
        with pytest.raises(PoolerError, match="SET lock_timeout = '90500ms'"):
            await database.require_sessions()


async def test_without_the_second_address_the_start_names_it(
    behind: Behind, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = behind.settings.model_copy(update={"database_listener": None})
    assert not await fits(alone)
    assert "set LLM_DATABASE_LISTENER_URL" in capsys.readouterr().err
    (found,) = [one for one in await examine(alone) if one.part == "database"]
    assert "LLM_DATABASE_LISTENER_URL" in found.to_do


async def test_statements_of_many_clients_do_not_mix(
    behind: Behind, postgres_server: PostgresServer
) -> None:
    """More connections of the pool than PgBouncer has sessions, each with statements of its own."""
    await set_role(postgres_server, behind.settings)
    wide = behind.settings.model_copy(update={"database_pool_size": 4 * CONNECTIONS})

    async def ask(database: Database, number: int) -> None:
        row = await database.fetchrow(f"SELECT $1::int + {number % 40} AS sum", number)
        assert row is not None
        assert row["sum"] == number + number % 40

    async with Database(wide, "test") as one, Database(wide, "test") as other:
        await asyncio.gather(*(ask((one, other)[n % 2], n) for n in range(1_500)))
        row = await one.fetchrow(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = $1", wide.database_name
        )
        assert row is not None
        assert row["count"] <= CONNECTIONS


async def test_connections_outside_the_pool_are_direct_and_have_the_settings(
    behind: Behind, postgres_server: PostgresServer
) -> None:
    """Migrations are not bound by the time-outs of the role."""
    await set_role(postgres_server, behind.settings)
    async with Database(behind.settings, "test") as database:
        connection = await database.connect()
        port = await connection.fetchval("SELECT current_setting('port')::int")
        assert port == postgres_server.port
        shown = {
            name: await connection.fetchval(f"SHOW {name}")
            for name in session_settings(behind.settings)
        }
        assert shown == session_settings(behind.settings)
        await connection.close()
    engine = make_engine(behind.settings)
    async with engine.connect() as migrating:
        for name, value in {"statement_timeout": "0", "enable_seqscan": "on"}.items():
            assert (await migrating.exec_driver_sql(f"SHOW {name}")).scalar_one() == value
    await engine.dispose()


async def test_the_doctor_sends_a_notification_through_it(
    behind: Behind, postgres_server: PostgresServer
) -> None:
    await set_role(postgres_server, behind.settings)
    findings = of_pooler(await examine(behind.settings))
    async with Database(behind.settings, "test") as database:
        await database.fetch("SELECT 1")
        statements = Level.OK if database.keeps_statements else Level.WARN
    assert [level for level, _ in findings] == [Level.OK, Level.OK, statements]
    await behind.bouncer.stop()
    ((level, found),) = of_pooler(
        await examine(behind.settings.model_copy(update={"database_timeout_seconds": 1.0}))
    )
    assert level is Level.FAIL
    assert "Start PgBouncer" in found
