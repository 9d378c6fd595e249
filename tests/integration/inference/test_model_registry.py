"""Models as a process knows them, on the real database: the tests set what the servers answer."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest

from app.api.container import Services, open_services
from app.core.errors import InvalidRequestError, ModelNotReadyError, UnknownModelError
from app.core.ids import new_id
from app.core.queue_names import queue_of
from app.core.settings import Settings
from app.inference.model_registry import ModelRegistry
from app.inference.pooling import Task
from app.inference.server_pool import DeadEngine, Server, ServerPool
from app.inference.server_store import ServerAddress
from app.inference.triton_client import IndexEntry
from app.results.pooling import choose_model
from tests.conftest import make_settings
from tests.pooling_models import pooling_entries
from tests.postgres import PostgresServer

SINCE = "2026-01-02T03:04:05+00:00"
DEAD = DeadEngine(datetime.fromisoformat(SINCE), "no answer")


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name, triton_grpc="")


@pytest.fixture
async def services(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Services]:
    """The servers `a` and `b`, without queries."""

    async def refresh(_: ServerPool) -> None:
        """Leave the servers as the test has set them."""

    monkeypatch.setattr(ServerPool, "refresh", refresh)
    async with open_services(settings, "test") as opened:
        for name in ("a", "b"):
            await opened.server_pool._enter(ServerAddress(name, f"{name}:1"))
        serve(opened, "a")
        serve(opened, "b")
        yield opened


@pytest.fixture
def registry(services: Services) -> ModelRegistry:
    return services.registry


def serve(services: Services, server: str, *entries: IndexEntry) -> Server:
    """Set the models of a server."""
    found = services.server_pool.get(server)
    found.models = {one.name: one for one in entries}
    found.error = None
    return found


def entry(name: str, version: int = 1, *, ready: bool = True, reason: str = "") -> IndexEntry:
    return IndexEntry(name, version, ready, reason)


async def add_worker(
    connection: asyncpg.Connection,
    load: dict[str, Any],
    *,
    lease: float = 3600,
    is_dead: bool = False,
) -> None:
    await connection.execute(
        "INSERT INTO workers (id, host, pid, load, lease_expires_at, dead_at) VALUES"
        " ($1, 'h', 1, $2, now() + make_interval(secs => $3), CASE WHEN $4 THEN now() END)",
        new_id(), orjson.dumps(load).decode(), lease, is_dead,
    )  # fmt: skip


def dead_on(server: str) -> dict[str, Any]:
    """The load of one model whose engine is dead on a server."""
    return {"dead": {server: {"since": SINCE, "reason": "no answer"}}}


# --- known models ---------------------------------------------------------------------------------


async def test_a_model_that_was_ready_stays_known(
    services: Services, registry: ModelRegistry, settings: Settings
) -> None:
    serve(services, "a", entry("m", 2), entry("never", ready=False, reason="broken"))
    await registry.refresh()
    assert [(one.name, one.version, one.ready, one.reason) for one in registry.all()] == [
        ("m", 2, True, "not loaded")
    ]
    assert registry.ready() == ["m"]
    serve(services, "a", entry("m", 3, ready=False, reason="unloaded"))
    await registry.refresh()
    (model,) = registry.all()
    assert (model.version, model.ready, model.reason) == (2, False, "unloaded")
    serve(services, "a")
    await registry.refresh()
    (model,) = registry.all()
    assert (model.version, model.ready, model.reason) == (2, False, "not in the repository")
    for server in services.server_pool.servers:
        server.error = "away"
    await registry.refresh()
    assert registry.all()[0].reason == registry.triton_error == "away"
    async with open_services(settings, "test") as others:
        others.server_pool._servers = {}
        await others.registry.refresh()
        (known,) = others.registry.all()
    assert (known.name, known.version, known.ready) == ("m", 2, False)
    assert known.first_seen_at is not None


async def test_news_alone_are_stored(
    services: Services, registry: ModelRegistry, connection: asyncpg.Connection
) -> None:
    async def stored() -> dict[str, int]:
        rows = await connection.fetch("SELECT name, version FROM models")
        return {row["name"]: row["version"] for row in rows}

    serve(services, "a", entry("m", 1), entry("n", 5))
    await registry.refresh()
    assert await stored() == {"m": 1, "n": 5}
    seen = {one.name: one.first_seen_at for one in registry.all()}
    serve(services, "a", entry("m", 2), entry("n", 5))
    await registry.refresh()
    assert await stored() == {"m": 2, "n": 5}
    assert {one.name: one.version for one in registry.all()} == {"m": 2, "n": 5}
    assert {one.name: one.first_seen_at for one in registry.all()} == seen
    await connection.execute("DELETE FROM models")
    await registry.refresh()
    serve(services, "a", entry("n", 5))
    await registry.refresh()
    assert await stored() == {}
    serve(services, "a", entry("o", 1), entry("n", 5))
    await registry.refresh()
    assert await stored() == {"n": 5, "o": 1}


async def test_an_unchanged_row_is_not_written_again(
    services: Services, registry: ModelRegistry, connection: asyncpg.Connection
) -> None:
    """Each update is a dead row, in every process at each restart."""
    serve(services, "a", entry("m"))
    await registry.refresh()
    before = await connection.fetchval("SELECT xmin::text FROM models")
    registry._stored = {}
    await registry.refresh()
    assert await connection.fetchval("SELECT xmin::text FROM models") == before


async def test_listeners_are_called_when_readiness_changes(
    services: Services, registry: ModelRegistry
) -> None:
    changes: list[list[str]] = []
    await registry.refresh()  # the first finds the servers
    registry.on_change(lambda: changes.append(registry.ready()))
    await registry.refresh()
    assert changes == []
    serve(services, "a", entry("m"))
    await registry.refresh()
    await registry.refresh()
    assert changes == [["m"]]
    serve(services, "b", entry("m"))  # a further place
    await registry.refresh()
    assert changes == [["m"], ["m"]]
    serve(services, "a")
    serve(services, "b", entry("m", ready=False))
    await registry.refresh()
    assert changes == [["m"], ["m"], []]


async def test_a_database_that_is_away_leaves_what_is_known(
    services: Services, registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(services, "a", entry("m"))
    await registry.refresh()
    errors: list[Exception] = [asyncpg.CannotConnectNowError(), asyncpg.UndefinedTableError()]

    async def fail(*_: object) -> None:
        raise errors[0]

    monkeypatch.setattr(registry._database, "fetch", fail)
    serve(services, "a", entry("m"), entry("n"))
    await registry.refresh()
    assert sorted(registry.ready()) == ["m", "n"]
    errors.pop(0)
    with pytest.raises(asyncpg.UndefinedTableError):
        await registry.refresh()


# --- models of requests ---------------------------------------------------------------------------


async def test_a_missing_model_is_looked_for_once_in_a_while(
    services: Services, registry: ModelRegistry
) -> None:
    await registry.refresh()
    serve(services, "a", entry("m"), entry("n"))
    with pytest.raises(UnknownModelError, match="none yet"):
        await registry.find("m")  # the last refresh is young
    registry._refreshed_at = asyncio.get_running_loop().time() - 100
    assert (await registry.find("m")).name == "m"
    with pytest.raises(UnknownModelError, match="Known models: m, n") as raised:
        await registry.find("x" * 100)
    assert raised.value.extra == {"known_models": ["m", "n"]}
    assert "x" * 65 not in raised.value.detail
    before = registry._refreshed_at
    await registry.find("m")
    assert registry._refreshed_at == before


async def test_the_default_is_the_only_ready_model(
    services: Services, registry: ModelRegistry
) -> None:
    with pytest.raises(ModelNotReadyError):
        await registry.default()
    serve(services, "a", entry("m"))
    serve(services, "b", entry("m"))
    await registry.refresh()
    assert (await registry.default()).name == "m"
    serve(services, "a", entry("m"), entry("n"))
    await registry.refresh()
    with pytest.raises(InvalidRequestError, match="m, n are ready"):
        await registry.default()
    registry._default = "n"
    assert (await registry.default()).name == "n"
    registry._default = "unknown"
    with pytest.raises(UnknownModelError):
        await registry.default()


async def test_the_default_of_a_task_is_the_only_ready_model_that_has_it(
    settings: Settings, services: Services, tmp_path: Path
) -> None:
    folders = pooling_entries(tmp_path)
    shutil.copytree(folders["pooling"], tmp_path / "second")
    registry = ModelRegistry(
        services.database, services.server_pool,
        settings.model_copy(update={"model_repository": tmp_path}),
    )  # fmt: skip

    async def choose(*ready: str, name: str | None = None, task: Task = "embed") -> str:
        loaded = [entry(one, ready=one in ready) for one in ("pooling", "ranking", "second")]
        serve(services, "a", *loaded, entry("text"))
        await registry.refresh()
        return (await choose_model(registry, name, task)).name

    assert await choose("pooling", "ranking", "second", name="second") == "second"
    assert await choose("pooling", "ranking") == "pooling"  # "second" is known, and not ready
    assert await choose("pooling", "ranking", task="score") == "ranking"
    assert await choose("pooling", "ranking", name="ranking") == "ranking"  # refused later, by name
    with pytest.raises(InvalidRequestError, match="pooling, second, text are ready") as refused:
        await choose("pooling", "second")
    assert [one.field for one in refused.value.errors] == ["model"]
    registry._default = "second"
    assert await choose("pooling", "second") == "second"
    assert await choose("pooling") == "pooling"  # the default has the task, and is not ready


async def test_placeholders_mean_the_default(services: Services, registry: ModelRegistry) -> None:
    serve(services, "a", entry("m"))
    await registry.refresh()
    for name in (None, "tgi", "dummy", "m"):
        assert (await registry.choose(name)).name == "m"
    with pytest.raises(UnknownModelError):
        await registry.choose("other")
    serve(services, "a", entry("m"), entry("tgi"))
    await registry.refresh()
    assert (await registry.choose("tgi")).name == "tgi"


# --- what workers report --------------------------------------------------------------------------


async def test_a_queue_is_served_by_a_living_worker(
    registry: ModelRegistry, connection: asyncpg.Connection
) -> None:
    await add_worker(connection, {queue_of("x"): {}, "m": {}})
    await add_worker(connection, {queue_of("x"): {}})
    await add_worker(connection, {queue_of("expired"): {}}, lease=-3600)
    await add_worker(connection, {queue_of("dead"): {}}, is_dead=True)
    await registry.refresh()
    assert registry.is_ready(queue_of("x"))
    for name in ("m", queue_of("expired"), queue_of("dead"), queue_of("unknown")):
        assert not registry.is_ready(name)
    assert (registry.serving(queue_of("x")).ready, registry.serving(queue_of("x")).reason) == (
        True,
        "",
    )
    other = registry.serving(queue_of("dead"))
    assert (other.ready, other.reason) == (False, "no attribution worker is up")


async def test_workers_agree_on_a_dead_engine_once_each_has_found_it(
    services: Services, registry: ModelRegistry, connection: asyncpg.Connection
) -> None:
    first = serve(services, "a", *(entry(name) for name in "mnkl"))
    second = serve(services, "b", entry("m"))
    await add_worker(connection, {"m": dead_on("a"), "n": dead_on("a")})
    await add_worker(connection, {"m": dead_on("a"), "n": {}})
    await add_worker(connection, {"other": {}})  # it runs neither
    for lease, is_dead in ((-3600.0, False), (3600.0, True)):
        await add_worker(connection, {"m": {}}, lease=lease, is_dead=is_dead)
        await add_worker(connection, {"m": dead_on("b")}, lease=lease, is_dead=is_dead)
    # The only living worker of these models does not report them.
    await add_worker(connection, {"k": {}, "l": {}})
    await add_worker(connection, {"k": dead_on("a")}, lease=-3600)
    await add_worker(connection, {"l": dead_on("a")}, is_dead=True)
    await registry.refresh()
    assert (first.dead, second.dead) == ({"m": DEAD}, {})
    assert sorted(registry.ready()) == ["k", "l", "m", "n"]  # `m` on the other server
    assert first.dead["m"].since.tzinfo == UTC
    await connection.execute("DELETE FROM workers")
    await registry.refresh()
    assert first.dead == {}
