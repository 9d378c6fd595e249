"""Calls by a sender alone: its connections, its lookups' threads, and its end."""

import asyncio
import socket
import threading
from typing import Any

from app.core.settings import Settings
from app.webhooks.sender import CallOutcome, Sender
from tests.conftest import make_settings
from tests.integration.support import until
from tests.integration.webhook_receiver import receiving
from tests.postgres import PostgresServer


def patient(server: PostgresServer) -> Settings:
    """A call lasts longer than the test; the sender has no database."""
    return make_settings(
        server, "unused", webhook_allow_private=True, webhook_timeout_seconds=100.0
    )


class Nameserver:
    """Responds at once for names that begin with `quick`, and for others when it may."""

    def __init__(self) -> None:
        self.may_respond = threading.Event()
        self.asked: list[str] = []
        self.ended: list[str] = []

    def __call__(self, host: str, _: int, **__: Any) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if not host.startswith("quick"):
            self.may_respond.wait(30)  # shorter than a call: a sender that waits for it ends, too
        self.ended.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "unknown name")


async def call(sender: Sender, url: str, team: str = "team") -> CallOutcome:
    return await sender.send(team, url, {}, b"{}")


async def test_each_call_has_a_connection_of_its_own(postgres_server: PostgresServer) -> None:
    connections, ended = 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, ended
        connections += 1
        while await reader.readline():  # until the client closes it
            if (await reader.readuntil(b"\r\n\r\n")) and await reader.readexactly(2):
                writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        ended += 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with Sender(patient(postgres_server)) as sender:
            outcomes = [await call(sender, f"http://127.0.0.1:{port}/") for _ in range(3)]
        await until(lambda: asyncio.sleep(0, ended == connections))
    assert outcomes == [CallOutcome("answered 500", 500)] * 3
    assert connections == 3


async def test_addresses_are_tried_in_their_order(postgres_server: PostgresServer) -> None:
    def lookup(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        wanted = {"first": ("127.0.0.1", "127.0.0.9"), "last": ("127.0.0.9", "127.0.0.1")}
        return [(0, 0, 0, "", (address, port)) for address in wanted[host.split(".")[0]]]

    async with receiving() as receiver, Sender(patient(postgres_server), lookup) as sender:
        for host in ("first", "last"):
            outcome = await call(sender, f"http://{host}.example:{receiver.port}/")
            assert outcome == CallOutcome(None, 204)


async def test_a_team_has_four_lookups_and_gets_the_next_when_one_ends(
    postgres_server: PostgresServer,
) -> None:
    names = Nameserver()
    async with Sender(patient(postgres_server), names) as sender:
        calls = [asyncio.create_task(call(sender, f"http://slow{n}.example/")) for n in range(9)]
        await until(lambda: asyncio.sleep(0, len(names.asked) >= 4))
        other = await call(sender, "http://quick.example/", "other team")
        assert other == CallOutcome("the name cannot be resolved: unknown name")
        assert len(names.asked) == 4 + 1
        names.may_respond.set()
        assert set(await asyncio.gather(*calls)) == {other}
    assert len(names.asked) == 9 + 1


async def test_the_end_of_a_sender_waits_for_no_lookup_and_drops_those_in_line(
    postgres_server: PostgresServer,
) -> None:
    """A process that stops does not wait for a nameserver that hangs."""
    names = Nameserver()
    async with Sender(patient(postgres_server), names) as sender:
        calls = [
            asyncio.create_task(call(sender, f"http://slow{n}.example/", f"team {n // 4}"))
            for n in range(40)
        ]
        await until(lambda: asyncio.sleep(0, len(names.asked) >= 32))
    assert names.ended == []
    assert sender._client._client.is_closed
    names.may_respond.set()
    await asyncio.to_thread(sender._client._lookups.join)
    assert len(names.asked) == 32
    outcome = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, asyncio.CancelledError) for one in outcome) == 40 - 32
