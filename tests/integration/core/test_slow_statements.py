"""The plan of a slow statement is logged: the cached one, without values, once in a while."""

import logging

import asyncpg
import pytest

from app.core import slow_statements
from app.core.database import Database
from app.core.settings import Settings

NAP = "SELECT count(pg_sleep($1::float8)) FROM workers WHERE host = $2"
LONG, SECRET = 0.6, "a-secret-value"


@pytest.fixture
def quick(settings: Settings) -> Settings:
    """Statements of half a second are slow."""
    return settings.model_copy(update={"slow_statement_seconds": 0.5})


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == slow_statements.__name__]


async def nap(database: Database, seconds: float) -> None:
    """Sleep in PostgreSQL for so long: the table has one row."""
    async with database.connection() as connection:
        await connection.fetchval(NAP, seconds, SECRET)


@pytest.fixture
async def row(connection: asyncpg.Connection) -> None:
    """The row of the statement."""
    await connection.execute(
        """INSERT INTO workers (id, host, pid, lease_expires_at)
           VALUES (gen_random_uuid(), $1, 1, now())""",
        SECRET,
    )


@pytest.mark.usefixtures("row")
async def test_a_slow_statement_is_logged_with_its_plan(
    quick: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with Database(quick, "test") as database:
        await nap(database, 0)
        assert logged(caplog) == []
        await nap(database, LONG)
        (message,) = logged(caplog)
        assert caplog.records[-1].levelno == logging.WARNING
        assert NAP in message
        assert "Scan on workers" in message
        assert "host = $2" in message
        assert SECRET not in message
        await nap(database, LONG)
        assert len(logged(caplog)) == 1, "every ten minutes"


async def test_a_failed_statement_has_no_plan(
    quick: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with Database(quick, "test") as database:
        with pytest.raises(asyncpg.DataError):
            async with database.connection() as connection:
                await connection.fetchval("SELECT 1 / count(pg_sleep(0.6)) + 1 / (count(*) - 1)")
        await nap(database, 0)
    assert logged(caplog) == []


async def test_a_plan_that_cannot_be_read_loses_no_result(
    quick: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> str:
        raise asyncpg.PostgresConnectionError("gone")

    monkeypatch.setattr(slow_statements, "_explain", fail)
    async with Database(quick, "test") as database:
        (row,) = await database.fetch("SELECT pg_sleep(0.6)::text, 7 AS number")
        assert row["number"] == 7
    assert "(no plan: gone)" in logged(caplog)[0]


@pytest.mark.trial
async def test_statements_are_remembered_up_to_a_limit(
    quick: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_statements, "_MAX_STATEMENTS", 2)
    async with Database(quick, "test") as database:
        for number in (1, 2, 3, 1):
            await database.fetch(f"SELECT pg_sleep(0.6), {number}")
    assert len(logged(caplog)) == 4
