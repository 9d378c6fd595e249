"""A pool and the table of servers: what joins, stays, leaves, and comes back.

No server answers: their address refuses connections.
"""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from app.api.container import open_services
from app.core.settings import Settings
from app.inference.server_pool import ServerPool
from app.inference.server_store import ServerAddress
from tests.conftest import make_settings
from tests.postgres import PostgresServer

HERE = "127.0.0.1:1"


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name, triton_grpc=HERE)


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[ServerPool]:
    async with open_services(settings, "test") as services:
        yield services.server_pool


async def refresh(pool: ServerPool) -> list[str]:
    """Read the table again, and return the names of the servers."""
    pool.outdate()
    await pool.refresh()
    return [one.name for one in pool.servers]


def address(number: int) -> str:
    """Another address that refuses connections."""
    return f"127.0.0.{number}:1"


async def test_servers_of_the_table_follow_those_of_the_settings_by_name(pool: ServerPool) -> None:
    assert await refresh(pool) == ["default"]
    await pool.store.add(ServerAddress("b", address(2)))
    await pool.refresh()
    assert len(pool.servers) == 1  # the table is read after a notification alone
    assert await refresh(pool) == ["default", "b"]
    await pool.store.add(ServerAddress("a", address(3)))
    assert await refresh(pool) == ["default", "a", "b"]
    await pool.store.remove("b")
    assert await refresh(pool) == ["default", "a"]


async def test_a_name_of_the_settings_is_not_taken_from_the_table(
    pool: ServerPool, connection: asyncpg.Connection
) -> None:
    """It was registered before the settings named a server."""
    await connection.execute("INSERT INTO servers (name, grpc) VALUES ('default', 'other:1')")
    before = pool.servers
    assert await refresh(pool) == ["default"]
    assert pool.servers == before
    assert pool.get("default").address.grpc == HERE


async def test_a_changed_declaration_keeps_the_connection(pool: ServerPool) -> None:
    await pool.store.add(ServerAddress("a", address(2)))
    await refresh(pool)
    server = pool.get("a")
    await pool.store.drain("a", is_draining=True)
    await refresh(pool)
    assert pool.get("a") is server
    assert server.address.is_draining


async def test_a_removed_server_stays_until_its_results_have_ended(pool: ServerPool) -> None:
    for number, name in ((2, "a"), (3, "b")):
        await pool.store.add(ServerAddress(name, address(number)))
    await refresh(pool)
    busy, idle = pool.get("a"), pool.get("b")
    with busy.occupied("m"):
        for name in ("a", "b"):
            await pool.store.remove(name)
        assert await refresh(pool) == ["default"]
        assert pool.at(address(2)) is busy
        assert pool.at(address(3)) is None
        assert pool._leaving == [busy]
        # Under another name, it is the same server with its running results.
        await pool.store.add(ServerAddress("c", address(2)))
        await pool.store.add(ServerAddress("b", address(3)))
        assert await refresh(pool) == ["default", "b", "c"]
        assert pool.get("c") is busy
        assert pool.get("b") is not idle
        assert pool._leaving == []
        await pool.store.remove("c")
        await refresh(pool)
    await pool.refresh()
    assert pool._leaving == []
    assert pool.at(address(2)) is None


async def test_another_address_under_a_name_is_another_server(pool: ServerPool) -> None:
    await pool.store.add(ServerAddress("a", address(2)))
    await refresh(pool)
    old = pool.get("a")
    with old.occupied("m"):
        await pool.store.remove("a")
        await pool.store.add(ServerAddress("a", address(3)))
        assert await refresh(pool) == ["default", "a"]
        assert pool.get("a") is not old
        assert pool.get("a").address.grpc == address(3)
        assert pool._leaving == [old]
        with pool.get("a").occupied("m"):
            await pool.store.remove("a")
            await pool.store.add(ServerAddress("a", address(2)))
            await refresh(pool)
            assert pool.get("a") is old


async def test_a_table_that_cannot_be_read_is_read_again(
    pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.store.add(ServerAddress("a", address(2)))
    await refresh(pool)
    await pool.store.add(ServerAddress("b", address(3)))
    error: Exception = asyncpg.CannotConnectNowError()

    async def fail() -> list[ServerAddress]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(pool.store, "all", fail)
        assert await refresh(pool) == ["default", "a"]  # as before
        error = asyncpg.UndefinedTableError()
        with pytest.raises(asyncpg.UndefinedTableError):
            await pool.refresh()
    await pool.refresh()
    assert [one.name for one in pool.servers] == ["default", "a", "b"]


async def test_a_server_that_refuses_connections_has_an_error_and_no_models(
    pool: ServerPool,
) -> None:
    server = pool.get("default")
    assert server.error == "not asked yet"
    await server.query_index()
    assert server.error is not None
    assert server.error.startswith(f"Triton at {HERE} does not answer")
    assert server.models == {}
    assert pool.error == server.error
