"""Waiting: every waiter is notified, also if the listening connection is lost or silent."""

import asyncio
import logging
from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from app.core import listener as listener_module
from app.core.database import Database
from app.core.errors import NotFoundError, TooManyWaitersError
from app.core.ids import new_id
from app.core.listener import CANCELLED, ENDED, ENQUEUED, Listener
from app.core.primary import Primary
from app.core.settings import Settings
from app.queue.job_queue import JobQueue
from app.results.rows import ResultRow
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from tests.conftest import connect, make_settings
from tests.integration.queue.queue_bench import Bench, ended
from tests.integration.support import until
from tests.postgres import PostgresServer
from tests.silent_proxy import SilentProxy

# asyncpg leaves its socket to the garbage collector when a connection breaks while it is made.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.usefixtures("collect_broken_sockets"),
]

TEAM = "default"


class Hub:
    """A hub that listens through a proxy, and a bench whose results it watches."""

    def __init__(
        self, hub: StreamHub, listener: Listener, bench: Bench, proxy: SilentProxy
    ) -> None:
        self.hub = hub
        self.listener = listener
        self.bench = bench
        self.proxy = proxy
        self.looks = 0  # times that everything was to be looked up

    def wait(self, result_id: UUID, seconds: float = 30.0) -> asyncio.Task[ResultRow]:
        return asyncio.create_task(self.hub.wait_terminal(TEAM, result_id, seconds))

    async def until_waiting(self, count: int) -> None:
        async def are_waiting() -> bool:
            return self.hub._waiters.count == count

        await until(are_waiting)
        await asyncio.sleep(0.05)  # and have read the table, so that only news can wake them

    async def complete(self, ids: list[UUID]) -> None:
        worker = await self.bench.worker()
        claims = await self.bench.claim(worker, len(ids))
        assert len(claims) == len(ids)
        lane = self.bench.queue.end_batcher(worker, 5.0)
        await asyncio.gather(*(lane.submit(ended(claim)) for claim in claims))

    async def listening_pid(self) -> int | None:
        pid: int | None = await self.bench.connection.fetchval(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'listening'"
        )
        return pid


@pytest.fixture
async def hub(
    postgres_server: PostgresServer, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Hub]:
    monkeypatch.setattr(listener_module, "_PING_SECONDS", 0.3)
    monkeypatch.setattr(listener_module, "_PING_TIMEOUT_SECONDS", 0.5)
    settings: Settings = make_settings(postgres_server, database_name, max_waiters=600)
    async with SilentProxy(postgres_server.host, postgres_server.port) as proxy:
        through = settings.model_copy(update={"database_host": f"127.0.0.1:{proxy.port}"})
        async with Database(settings, "test") as database, Database(through, "listening") as heard:
            listener = Listener(heard)
            results = ResultStore(database, JobQueue(database, settings), settings)
            connection = await connect(settings)
            stream_hub = StreamHub(database, results, settings)
            stream_hub.subscribe(listener)
            made = Hub(stream_hub, listener, Bench(database, settings, connection), proxy)

            def count_looks(payload: str) -> None:
                made.looks += not payload

            listener.subscribe(ENDED, count_looks)
            listening = asyncio.create_task(listener.run())

            async def is_connected() -> bool:
                return made.looks == 1

            await until(is_connected)
            yield made
            listening.cancel()
            await asyncio.wait([listening])
            await connection.close()


async def test_five_hundred_waiters_are_told(hub: Hub) -> None:
    ids = await hub.bench.add(250)
    waiting = [hub.wait(identifier) for identifier in ids for _ in range(2)]
    await hub.until_waiting(500)
    await hub.complete(ids)
    rows = await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert {row.state for row in rows} == {"completed"}
    assert hub.hub._waiters.count == 0
    assert hub.hub._waiters._signals == {}


async def test_a_closed_hub_waits_for_no_result(hub: Hub) -> None:
    """No event sets the signal of a result that is stored while the process stops."""
    (identifier,) = await hub.bench.add(1)
    hub.hub.close()
    for is_new in (False, True):
        with hub.hub.expecting(TEAM, identifier) as signal:
            wait = hub.hub.wait_terminal(TEAM, identifier, 60, signal, is_new=is_new)
            assert (await asyncio.wait_for(wait, 20)).state == "pending"


async def test_only_the_results_own_waiters_wake(hub: Hub) -> None:
    first, second = await hub.bench.add(2)
    of_first, of_second = hub.wait(first), hub.wait(second, 1.0)
    await hub.until_waiting(2)
    await hub.complete([first])
    assert (await asyncio.wait_for(of_first, 20)).state == "completed"
    assert (await of_second).state == "pending"


async def test_a_result_that_ended_before_is_answered_at_once(hub: Hub) -> None:
    (identifier,) = await hub.bench.add()
    await hub.complete([identifier])
    row = await asyncio.wait_for(hub.hub.wait_terminal(TEAM, identifier, 30), 20)
    assert row.state == "completed"


async def test_a_result_that_ends_while_its_waiter_subscribes(hub: Hub) -> None:
    for _ in range(20):
        (identifier,) = await hub.bench.add()
        waiting = hub.wait(identifier)
        await hub.complete([identifier])
        assert (await asyncio.wait_for(waiting, 20)).state == "completed"


async def test_unknown_results_and_other_teams(hub: Hub) -> None:
    with pytest.raises(NotFoundError):
        await hub.hub.wait_terminal(TEAM, new_id(), 30)
    (identifier,) = await hub.bench.add()
    for seconds in (0, 30):
        with pytest.raises(NotFoundError):
            await hub.hub.wait_terminal("other", identifier, seconds)
    assert hub.hub._waiters._signals == {}


async def test_a_waiter_that_leaves_is_forgotten(hub: Hub) -> None:
    (identifier,) = await hub.bench.add()
    leaving, staying = hub.wait(identifier), hub.wait(identifier)
    await hub.until_waiting(2)
    leaving.cancel()
    await asyncio.wait([leaving])
    await hub.until_waiting(1)
    await hub.complete([identifier])
    assert (await asyncio.wait_for(staying, 20)).state == "completed"


async def test_too_many_waiters(hub: Hub) -> None:
    (identifier,) = await hub.bench.add()
    waiting = [hub.wait(identifier) for _ in range(600)]
    await hub.until_waiting(600)
    assert hub.hub.is_full_for(TEAM)
    with pytest.raises(TooManyWaitersError):
        await hub.hub.wait_terminal(TEAM, identifier, 1)
    assert (await hub.hub.wait_terminal(TEAM, identifier, 0)).state == "pending"
    await hub.complete([identifier])
    await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert not hub.hub.is_full_for(TEAM)


async def test_a_listener_whose_connection_is_ended_tells_everyone_still(hub: Hub) -> None:
    ids = await hub.bench.add(50)
    waiting = [hub.wait(identifier) for identifier in ids]
    await hub.until_waiting(50)
    pid = await hub.listening_pid()
    await hub.bench.connection.execute("SELECT pg_terminate_backend($1, 5000)", pid)
    await hub.complete(ids)
    rows = await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert {row.state for row in rows} == {"completed"}
    assert hub.looks >= 2


async def test_a_listener_whose_connection_goes_silent_tells_everyone_still(hub: Hub) -> None:
    ids = await hub.bench.add(50)
    waiting = [hub.wait(identifier) for identifier in ids]
    await hub.until_waiting(50)
    hub.proxy.freeze_the_open()
    await hub.complete(ids)
    rows = await asyncio.wait_for(asyncio.gather(*waiting), 20)  # ping 0.3 s, its timeout 0.5 s
    assert {row.state for row in rows} == {"completed"}
    assert hub.proxy.connections >= 2


async def test_a_listener_that_cannot_connect_tries_again(
    postgres_server: PostgresServer, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(postgres_server, database_name)
    nowhere = settings.model_copy(update={"database_host": "127.0.0.1:1"})
    heard = asyncio.Event()
    async with Database(nowhere, "test") as database:
        listener = Listener(database)
        listener.subscribe(ENQUEUED, lambda _: heard.set())
        running = asyncio.create_task(listener.run())

        async def has_failed_twice() -> bool:
            assert not running.done()
            return caplog.text.count("listener lost its connection") >= 2

        with caplog.at_level(logging.INFO, listener_module.__name__):
            await until(has_failed_twice)
        assert not heard.is_set()
        database._direct = Primary(settings.database_addresses())  # the server is back
        await asyncio.wait_for(heard.wait(), 20)
        running.cancel()
        await asyncio.wait([running])


async def test_each_handler_of_a_channel_is_called(
    postgres_server: PostgresServer, database_name: str
) -> None:
    settings = make_settings(postgres_server, database_name)
    heard: list[tuple[str, str]] = []
    async with Database(settings, "test") as database:
        listener = Listener(database)
        listener.subscribe(CANCELLED, lambda payload: heard.append(("first", payload)))
        listener.subscribe(CANCELLED, lambda payload: heard.append(("second", payload)))
        running = asyncio.create_task(listener.run())

        async def has_heard(count: int = 2) -> bool:
            return len(heard) >= count

        await until(has_heard)
        await database.fetch("SELECT pg_notify($1, 'abc')", CANCELLED)
        await until(lambda: has_heard(4))
        assert heard == [(n, p) for p in ("", "abc") for n in ("first", "second")]
        running.cancel()
        await asyncio.wait([running])
