"""Accepted connections: turns of addresses, bounds, and a process without file descriptors."""

import asyncio
import contextlib
import gc
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import uvloop

from app.api import acceptor
from app.api.acceptor import Acceptor, _network
from tests.integration.support import until

STORM, OTHER = "127.0.0.1", "127.0.0.2"
CONNECTIONS = 300


@dataclass
class Begun:
    """The clients' addresses of connections that have begun, in their order."""

    hosts: list[str] = field(default_factory=list)
    transports: list[asyncio.Transport] = field(default_factory=list)

    async def are(self, count: int) -> bool:
        return len(self.hosts) >= count


class Echo(asyncio.Protocol):
    def __init__(self, begun: Begun) -> None:
        self._begun = begun

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of another class
        self._begun.hosts.append(transport.get_extra_info("peername")[0])
        self._begun.transports.append(self._transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@contextlib.asynccontextmanager
async def accepting() -> AsyncIterator[tuple[Acceptor, Begun]]:
    begun = Begun()
    listening = socket.create_server((STORM, 0), backlog=2048)
    server = Acceptor(listening, lambda: Echo(begun))
    try:
        yield server, begun
    finally:
        server.close()
        for transport in begun.transports:
            transport.abort()
        await asyncio.sleep(0)


def connect(server: Acceptor, source: str, count: int) -> list[socket.socket]:
    """Connections to a loop that does not run meanwhile."""
    address = server.sockets[0].getsockname()
    return [socket.create_connection(address, source_address=(source, 0)) for _ in range(count)]


@contextlib.contextmanager
def closing(clients: list[socket.socket]) -> Iterator[None]:
    yield
    for client in clients:
        client.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as made:
        yield made


def test_one_connection_begins_before_the_many_of_another_address(runner: asyncio.Runner) -> None:
    async def work() -> list[str]:
        async with accepting() as (server, begun):
            clients = connect(server, STORM, CONNECTIONS) + connect(server, OTHER, 1)
            with closing(clients):
                await until(lambda: begun.are(CONNECTIONS + 1))
            return begun.hosts

    hosts = runner.run(work())
    assert hosts.index(OTHER) < CONNECTIONS // 4
    assert hosts.count(STORM) == CONNECTIONS


def test_each_address_has_its_turn(runner: asyncio.Runner) -> None:
    async def work() -> list[str]:
        async with accepting() as (server, begun):
            clients = connect(server, STORM, 6) + connect(server, OTHER, 6)
            with closing(clients):
                await until(lambda: begun.are(12))
            return begun.hosts

    assert runner.run(work()) == [STORM, OTHER] * 6


@pytest.mark.trial
def test_bytes_go_both_ways_and_an_end_frees_the_descriptor(runner: asyncio.Runner) -> None:
    async def work() -> bytes:
        async with accepting() as (server, begun):
            loop, before = asyncio.get_running_loop(), open_sockets()
            (client,) = connect(server, STORM, 1)
            with closing([client]):
                client.setblocking(False)
                await loop.sock_sendall(client, b"ping")
                answer = await loop.sock_recv(client, 10)
                assert len(open_sockets() - before) >= 2
                begun.transports.pop().abort()
                # The loop closes the socket in a later turn.
                await until(only_open(before | {name_of(client)}))
            return answer

    assert runner.run(work()) == b"ping"


def test_further_connections_wait_in_the_kernel(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is lost."""
    monkeypatch.setattr(acceptor, "_MOST_WAITING", 20)

    async def work() -> tuple[int, int]:
        most = 0
        async with accepting() as (server, begun):
            with closing(connect(server, STORM, CONNECTIONS)):
                while not await begun.are(CONNECTIONS):
                    most = max(most, server._count)
                    await asyncio.sleep(0)
        return len(begun.hosts), most

    assert runner.run(work()) == (CONNECTIONS, 20)


def test_it_goes_on_once_there_are_file_descriptors(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_SECONDS", 0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def work() -> int:
        async with accepting() as (server, begun):
            with closing(connect(server, STORM, 40)):
                os.close(lowest := os.dup(0))
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 10, hard))
                try:
                    await asyncio.sleep(0.5)  # five pauses of the acceptor
                    few = len(begun.hosts)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await until(lambda: begun.are(40))
            return few

    assert runner.run(work()) < 40
    errors = [one for one in caplog.messages if one.startswith("cannot accept connections")]
    assert 1 <= len(errors) <= 6  # one a pause


def test_close_ends_those_that_wait(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> bytes:
        async with accepting() as (server, _):
            (client,) = connect(server, STORM, 1)
            server._accept()
            server.close()
            await server.wait_closed()
            await asyncio.sleep(0.01)  # the turns that were under way
            with closing([client]):
                return client.recv(1)

    with contextlib.suppress(ConnectionResetError):
        assert runner.run(work()) == b""
    assert not caplog.messages


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
    ],
)
def test_addresses_that_share_turns(one: str, other: str, are_one: bool) -> None:
    assert (_network(one) == _network(other)) is are_one


def open_sockets() -> set[str]:
    """The names of this process's sockets; a later socket has another name, unlike its descriptor."""
    gc.collect()
    names = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread closed it
            names.add(str(descriptor.readlink()))
    return {name for name in names if name.startswith("socket:")}


def name_of(one: socket.socket) -> str:
    return str(Path(f"/proc/self/fd/{one.fileno()}").readlink())


def only_open(names: set[str]) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        return open_sockets() <= names

    return is_so
