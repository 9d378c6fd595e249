"""Servers and pools without a connection: what is ready, where, and what workers report."""

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import pytest

from app.core.errors import NotFoundError, TritonUnavailableError
from app.core.settings import Settings
from app.inference.server_pool import (
    DeadEngine,
    DeadReport,
    Server,
    ServerPool,
    static_addresses,
)
from app.inference.server_store import ServerAddress
from app.inference.triton_client import IndexEntry

DEAD = DeadEngine(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "no answer")


def entry(
    name: str, *, ready: bool = True, version: int | None = 1, reason: str = ""
) -> IndexEntry:
    return IndexEntry(name, version, ready, reason)


def make_server(name: str, *entries: IndexEntry, **members: Any) -> Server:
    """A server as its last query left it."""
    made = Server(ServerAddress(name, members.pop("grpc", f"{name}:1"), **members), 10)
    made.models = {one.name: one for one in entries}
    made.error = None
    return made


def make_settings_of(**values: str) -> Settings:
    """Settings of servers; no database is there."""
    database = {f"database_{name}": "unused" for name in ("host", "user", "password", "name")}
    return Settings.model_validate(
        database | {"triton_grpc": "", "triton_http": "", "triton_metrics": ""} | values
    )


def make_pool(*servers: Server) -> ServerPool:
    """A pool that neither reads the table nor queries servers."""
    database: Any = None
    pool = ServerPool(database, make_settings_of())
    pool._servers = {server.name: server for server in servers}
    return pool


# --- one server -----------------------------------------------------------------------------------


def test_a_declaration_is_served_if_address_and_secret_are_the_same() -> None:
    server = make_server("a", grpc="host:1", secret="s" * 16)
    assert server.is_at(ServerAddress("b", "host:1", secret="s" * 16))
    assert not server.is_at(ServerAddress("a", "host:2", secret="s" * 16))
    assert not server.is_at(ServerAddress("a", "host:1", secret="t" * 16))


def test_slots_are_the_servers_or_the_default() -> None:
    assert make_server("a").slots == 10
    assert make_server("a", slots=3).slots == 3


def test_ready_models_are_neither_dead_nor_drained() -> None:
    server = make_server("a", entry("m"), entry("n", ready=False), entry("o"))
    assert server.ready() == ["m", "o"]
    server.dead = {"o": DEAD, "n": DEAD}
    assert server.ready() == ["m"]
    drained = make_server("a", entry("m"), is_draining=True)
    assert drained.ready() == []


def test_a_model_with_a_dead_engine_is_not_ready() -> None:
    server = make_server("a", entry("z"), entry("m", version=3))
    server.dead = {"m": DEAD, "unloaded": DEAD}
    dead, alive = server.entries()
    assert alive == entry("z")
    reason = "engine dead since 2026-01-02 03:04:05 UTC: no answer (server a)"
    assert dead == IndexEntry("m", 3, False, reason, DEAD.since)
    assert server.models["m"].ready  # as Triton reports it


def test_running_results_are_counted_by_model() -> None:
    server = make_server("a")
    with server.occupied("m"), server.occupied("m"), server.occupied("n"):
        assert server.running == {"m": 2, "n": 1}
    with pytest.raises(KeyError), server.occupied("m"):
        raise KeyError
    assert server.running.total() == 0


class Answers:
    """A client whose index is this list, or fails with this text; it waits where it must."""

    def __init__(self, answer: list[IndexEntry] | str = "", address: str = "a:1") -> None:
        self.answer = answer
        self.address = address
        self.may_answer = asyncio.Event()
        self.is_closed = False

    def retire_sessions(self, ready: Collection[str]) -> None:
        self.kept = list(ready)

    async def index(self) -> list[IndexEntry]:
        await self.may_answer.wait()
        if isinstance(self.answer, str):
            raise TritonUnavailableError(self.answer)
        return self.answer

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True


def answer_with(server: Server, answer: list[IndexEntry] | str) -> Answers:
    client: Any = Answers(answer)
    client.may_answer.set()
    server.client = client
    found: Answers = client
    return found


async def test_one_query_of_a_server_runs_at_a_time() -> None:
    server = make_server("a")
    client = answer_with(server, [entry("m"), entry("n", ready=False)])
    client.may_answer.clear()
    first = server.query_index()
    assert server.query_index() is first
    client.may_answer.set()
    await first
    assert server.models == {"m": entry("m"), "n": entry("n", ready=False)}
    second = server.query_index()
    assert second is not first
    await second


@pytest.mark.parametrize(
    ("detail", "error"),
    [
        ("a:1: refused", "a:1: refused"), ("broken", "a:1: broken. Is that Triton's gRPC port?"),
        ("a:1: no HTTP/2", "a:1: no HTTP/2 Is that Triton's gRPC port?"),
        ("no HTTP/2", "a:1: no HTTP/2. Is that Triton's gRPC port?"),
    ],
)  # fmt: skip
async def test_a_failed_query_is_logged_once(
    detail: str, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server("a", entry("m"))
    client = answer_with(server, detail)
    for _ in range(3):
        await server.query_index()
    assert (server.error, server.models) == (error, {})
    assert [one.getMessage() for one in caplog.records] == [f"server a: {error}"]
    client.answer = [entry("m")]
    await server.query_index()
    assert (server.error, server.ready()) == (None, ["m"])
    client.answer = detail
    await server.query_index()
    assert len(caplog.records) == 2


async def test_a_late_server_is_not_ready() -> None:
    server = make_server("a", entry("m"))
    client = answer_with(server, [entry("m")])
    client.may_answer.clear()
    query = server.query_index()
    server.check_lateness()
    assert (server.error, server.ready()) == (None, ["m"])
    server._queried_at -= 100
    server.check_lateness()
    assert server.error == "a:1: no answer for 5 s"
    assert server.models == {"m": entry("m", ready=False, reason="a:1: no answer for 5 s")}
    client.may_answer.set()
    await query
    assert server.ready() == ["m"]


async def test_a_closed_server_ends_its_query_and_its_channel() -> None:
    server = make_server("a", entry("m"))
    client = answer_with(server, [entry("m")])
    client.may_answer.clear()
    query = server.query_index()
    await server.close()
    assert query.cancelled()
    assert client.is_closed
    assert server.models == {}
    unqueried = make_server("b")
    await unqueried.client.__aenter__()
    await unqueried.close()


# --- the pool -------------------------------------------------------------------------------------


def test_a_pool_reports_an_error_if_no_server_answers() -> None:
    first, second = make_server("a"), make_server("b")
    pool = make_pool(first, second)
    assert pool.error is None
    first.error = "first"
    assert pool.error is None
    second.error = "second"
    errors = [pool.error]  # a property: mypy remembers its first value
    assert errors == ["first"]
    assert "there is no server" in str(make_pool().error)


def test_servers_are_found_by_name_address_and_model() -> None:
    first = make_server("a", entry("m"), entry("n"))
    second = make_server("b", entry("n"))
    left = make_server("c", entry("m"), grpc="left:1")
    pool = make_pool(first, second)
    pool._leaving = [left]
    assert pool.servers == [first, second]
    assert pool.get("b") is pool.find("b") is second
    assert pool.find("c") is None
    with pytest.raises(NotFoundError):
        pool.get("c")
    assert pool.at("b:1") is second
    assert pool.at("left:1") is left
    assert pool.at("other:1") is None
    assert pool.serving("m") == [first]
    assert pool.serving("n") == [first, second]
    assert pool.placement() == {"a": ["m", "n"], "b": ["n"]}


def test_the_best_entry_of_a_model_is_ready_then_of_the_highest_version() -> None:
    pool = make_pool(
        make_server("a", entry("m", version=1), entry("n", ready=False, version=9), entry("o")),
        make_server("b", entry("m", version=2), entry("n", version=None), entry("o", reason="2nd")),
        make_server("c", entry("m", ready=False, version=3), entry("n", ready=False)),
    )
    entries = pool.entries()
    assert (entries["m"].version, entries["m"].ready) == (2, True)
    assert (entries["n"].version, entries["n"].ready) == (None, True)
    assert entries["o"].reason == ""  # the first of equal ones


def test_models_of_a_drained_server_are_not_ready() -> None:
    drained = make_server(
        "a", entry("m"), entry("n", ready=False, reason="loading"), is_draining=True
    )
    entries = make_pool(drained).entries()
    assert entries["m"] == entry("m", ready=False, reason="its server is drained")
    assert entries["n"].reason == "loading"
    both = make_pool(drained, make_server("b", entry("m"))).entries()
    assert both["m"].ready


def test_agreed_reports_hide_a_model_where_no_worker_runs() -> None:
    first, second = make_server("a", entry("m"), entry("n")), make_server("b", entry("m"))
    pool = make_pool(first, second)
    pool.report(
        [
            DeadReport("a", "m", DEAD, is_agreed=True),
            DeadReport("a", "n", DEAD, is_agreed=False),
            DeadReport("unknown", "m", DEAD, is_agreed=True),
        ]
    )
    assert (first.dead, second.dead) == ({"m": DEAD}, {})
    pool.report([DeadReport("b", "m", DEAD, is_agreed=True)])
    assert (first.dead, second.dead) == ({}, {"m": DEAD})


def test_a_worker_gets_each_report_and_hides_nothing() -> None:
    first, second = make_server("a", entry("m")), make_server("b", entry("m"))
    pool, heard = make_pool(first, second), list[tuple[str, str, DeadEngine]]()
    pool.on_report = lambda server, model, dead: heard.append((server.name, model, dead))
    pool.report(
        [
            DeadReport("a", "m", DEAD, is_agreed=True),
            DeadReport("b", "m", DEAD, is_agreed=False),
            DeadReport("b", "n", DEAD, is_agreed=True),
        ]
    )
    assert heard == [("a", "m", DEAD), ("b", "m", DEAD), ("b", "n", DEAD)]
    assert first.dead == second.dead == {}


def test_the_settings_name_servers_and_their_further_addresses() -> None:
    settings = make_settings_of(
        triton_grpc="a:1,b:1,c:1", triton_http="a:2,b:2,c:2", triton_secret="s" * 32
    )
    found = static_addresses(settings)
    assert [(one.name, one.grpc, one.http, one.metrics) for one in found] == [
        ("default", "a:1", "a:2", None),
        ("default-2", "b:1", "b:2", None),
        ("default-3", "c:1", "c:2", None),
    ]
    assert all(one.is_static and one.secret for one in found)
    (one,) = static_addresses(make_settings_of(triton_grpc="a:1", triton_metrics="a:3"))
    assert (one.http, one.metrics, one.secret) == (None, "a:3", None)
    assert static_addresses(make_settings_of()) == []
