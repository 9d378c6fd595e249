"""Several servers, of which one takes writes: which is taken, and when it is left."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import asyncpg
import pytest

from app.core.database import Database
from app.core.errors import DatabaseUnavailableError
from app.core.migration_engine import make_engine
from app.core.primary import NoPrimaryError, Primary
from app.core.settings import Settings
from tests.conftest import make_settings, run_service
from tests.postgres import PostgresServer

READ_ONLY = "ALTER DATABASE {} SET default_transaction_read_only = {}"


@dataclass
class Silent:
    """A server that takes connections and sends nothing."""

    port: int
    asked: int = 0

    async def hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        await reader.read()
        writer.close()


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    found = Silent(0)
    server = await asyncio.start_server(found.hold, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


@pytest.mark.trial
async def test_the_one_that_is_up_is_found(
    postgres_server: PostgresServer, database_name: str, silent: Silent
) -> None:
    """The other servers have no influence; later connections try only the primary."""
    good = f"{postgres_server.host}:{postgres_server.port}"
    settings = make_settings(
        postgres_server,
        database_name,
        database_host=f"127.0.0.1:1,127.0.0.1:{silent.port},{good}",
    )
    async with Database(settings, "test") as database:
        assert await database.fetchrow("SELECT 1") is not None
        assert silent.asked == 1
        await (await database.connect()).close()
        assert silent.asked == 1
    engine = make_engine(settings)
    async with engine.connect() as connection:
        assert (await connection.exec_driver_sql("SELECT 1")).scalar_one() == 1
    await engine.dispose()


@pytest.mark.trial
async def test_none_takes_writes(
    postgres_server: PostgresServer, database_name: str, silent: Silent
) -> None:
    """Only if all of them answered, none can be the primary."""
    await postgres_server.execute(READ_ONLY.format(database_name, "on"))
    arguments = {
        "user": postgres_server.user,
        "password": postgres_server.password,
        "database": database_name,
    }
    nobody, standby = ("127.0.0.1", 1), (postgres_server.host, postgres_server.port)
    with pytest.raises(NoPrimaryError):
        await Primary([nobody, standby]).connect(**arguments)
    with pytest.raises(TimeoutError):
        await Primary([("127.0.0.1", silent.port), nobody, standby]).connect(**arguments)
    # The only one there is, is still good for reads.
    connection = await Primary([standby]).connect(**arguments)
    assert await connection.fetchval("SELECT 1") == 1
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        await connection.execute("CREATE TABLE t ()")
    await connection.close()


async def test_a_server_that_becomes_read_only_is_left(
    settings: Settings, postgres_server: PostgresServer, database_name: str
) -> None:
    """A write that it refuses is sent again over a new connection, for as long as a request waits."""
    patient = settings.model_copy(update={"database_timeout_seconds": 1.0})
    write = "UPDATE workers SET load = '{}'"
    async with Database(patient, "test") as database:
        await postgres_server.execute(READ_ONLY.format(database_name, "on"))
        with pytest.raises(DatabaseUnavailableError):
            await database.fetch(write)
        await postgres_server.execute(READ_ONLY.format(database_name, "off"))
        await database.fetch(write)  # the connections from then are gone


@pytest.mark.trial
async def test_what_is_found_is_told_when_the_standby_has_it(
    settings: Settings, postgres_server: PostgresServer, database_name: str
) -> None:
    """Not before: the server may have come up again, and show what it had committed alone."""
    body = {"model": "scripted", "content": "Once {{chunks=1}}", "idempotency_key": "k"}
    patient = settings.model_copy(update={"database_timeout_seconds": 1.0})
    await postgres_server.execute(f"ALTER DATABASE {database_name} SET synchronous_commit = on")
    async with run_service(patient, with_worker=False) as service:
        first = await service.client.post("/results/", json=body)
        assert first.status_code == 202
        await postgres_server.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
        try:
            await postgres_server.execute("SELECT pg_reload_conf()")
            await asyncio.sleep(1)  # the setting comes in its own time
            assert (await service.client.post("/results/", json=body)).status_code == 503
            assert (await service.client.get(f"/results/{first.json()['id']}")).status_code == 200
        finally:
            await postgres_server.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await postgres_server.execute("SELECT pg_reload_conf()")
        again = await service.client.post("/results/", json=body)
        assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
