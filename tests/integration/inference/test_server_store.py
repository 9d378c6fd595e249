"""The table of servers: registration, its conflicts, draining, and running results."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import orjson
import pytest

from app.api.container import open_services
from app.core.errors import ConflictError, InvalidRequestError, NotFoundError
from app.core.ids import new_id
from app.core.settings import Settings
from app.inference.server_store import ServerAddress, ServerStore, check
from tests.conftest import make_settings
from tests.postgres import PostgresServer

SERVER = ServerAddress("a", "a:1", "a:2", "a:3", 5, secret="s" * 32)


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name, triton_grpc="")


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[ServerStore]:
    async with open_services(settings, "test") as services:
        yield services.server_pool.store


async def test_a_server_is_registered_once(store: ServerStore) -> None:
    assert await store.add(SERVER) == SERVER
    assert await store.add(SERVER) == SERVER
    other = ServerAddress("0", "b:1")
    assert await store.add(other) == other
    assert await store.all() == [other, SERVER]


@pytest.mark.parametrize(
    "change",
    [{"grpc": "z:1"}, {"http": None}, {"metrics": "z:3"}, {"slots": 6}, {"secret": "t" * 32}],
)
async def test_a_name_has_one_declaration(store: ServerStore, change: dict[str, Any]) -> None:
    await store.add(SERVER)
    members: dict[str, Any] = {
        "grpc": "a:1", "http": "a:2", "metrics": "a:3", "slots": 5, "secret": "s" * 32,
    }  # fmt: skip
    with pytest.raises(ConflictError, match="There is a server 'a' already, at a:1"):
        await store.add(ServerAddress("a", **(members | change)))
    assert await store.all() == [SERVER]


async def test_an_address_has_one_name(store: ServerStore) -> None:
    await store.add(SERVER)
    with pytest.raises(ConflictError, match="a:1 is registered already, as 'a'"):
        await store.add(ServerAddress("b", "a:1"))
    # Both are in use, by two servers: the name comes first.
    await store.add(ServerAddress("b", "b:1"))
    for name, grpc in (("a", "b:1"), ("b", "a:1")):
        with pytest.raises(ConflictError, match=f"There is a server '{name}' already"):
            await store.add(ServerAddress(name, grpc))


async def test_a_server_removed_during_its_registration_is_a_conflict(
    store: ServerStore, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.add(SERVER)
    fetchrow = store._database.fetchrow

    async def remove_before(query: str, *arguments: object) -> object:
        if "INSERT" not in query:
            await connection.execute("DELETE FROM servers")
        return await fetchrow(query, *arguments)

    monkeypatch.setattr(store._database, "fetchrow", remove_before)
    with pytest.raises(ConflictError, match="was removed at this moment"):
        await store.add(SERVER)


async def test_a_server_is_drained_and_removed_by_its_name(store: ServerStore) -> None:
    other = ServerAddress("b", "b:1")
    await store.add(SERVER)
    await store.add(other)
    assert (await store.drain("b", is_draining=True)).is_draining
    assert [one.is_draining for one in await store.all()] == [False, True]
    assert await store.drain("b", is_draining=False) == other
    await store.remove("b")
    assert await store.all() == [SERVER]
    with pytest.raises(NotFoundError):
        await store.drain("b", is_draining=True)
    with pytest.raises(NotFoundError):
        await store.remove("b")


async def test_running_results_are_those_of_living_workers(
    store: ServerStore, connection: asyncpg.Connection
) -> None:
    for servers, lease, is_dead in (
        ({"a": 2, "b": 1}, 3600, False), ({"a": 3}, 3600, False), ({"a": 10}, 3600, True),
        ({"a": 20}, -3600, False),
    ):  # fmt: skip
        await connection.execute(
            "INSERT INTO workers (id, host, pid, servers, lease_expires_at, dead_at) VALUES"
            " ($1, 'h', 1, $2, now() + make_interval(secs => $3), CASE WHEN $4 THEN now() END)",
            new_id(), orjson.dumps(servers).decode(), lease, is_dead,
        )  # fmt: skip
    assert await store.running() == {"a": 5, "b": 1}


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "members",
    [
        {}, {"name": "a" * 63}, {"name": "9.a_b-c"}, {"name": "defaults"}, {"name": "default-x"},
        {"grpc": "10.0.0.1:1"}, {"grpc": "[::1]:65535"}, {"slots": 1}, {"slots": 10_000},
        {"http": "h:2", "metrics": "h:3"}, {"secret": "s" * 32},
    ],
)  # fmt: skip
def test_declarations_are_accepted(members: dict[str, Any]) -> None:
    check(ServerAddress(**({"name": "a", "grpc": "a:1"} | members)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""), ("name", "a" * 64), ("name", ".a"), ("name", "a/b"), ("name", "a\n"),
        ("name", "default"), ("name", "default-2"), ("name", "default-23"),
        ("grpc", "a"), ("grpc", "a:0"), ("grpc", "a:65536"), ("grpc", "a:1/x"), ("grpc", ":1"),
        ("grpc", "::1:1"), ("grpc", "http://a:1"), ("http", "a"), ("metrics", "a:0"),
        ("slots", 0), ("slots", -1), ("slots", 10_001),
        ("secret", ""), ("secret", "s" * 32 + " "), ("secret", "a,b"),
    ],
)  # fmt: skip
def test_a_wrong_member_of_a_declaration_is_named(field: str, value: Any) -> None:
    members: dict[str, Any] = {"name": "a", "grpc": "a:1", field: value}
    with pytest.raises(InvalidRequestError) as raised:
        check(ServerAddress(**members))
    assert [error.field for error in raised.value.errors] == [field]


def test_each_wrong_member_is_named() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check(ServerAddress("default", "a", "b", "c", 0, secret=""))
    fields = [error.field for error in raised.value.errors]
    assert fields == ["name", "grpc", "http", "metrics", "slots", "secret"]


async def test_a_wrong_declaration_is_not_stored(store: ServerStore) -> None:
    with pytest.raises(InvalidRequestError):
        await store.add(ServerAddress("default", "a:1"))
    assert await store.all() == []
