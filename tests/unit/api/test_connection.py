"""HTTP connections: offers of other protocols, HTTP/1.0, and connections without a request.

A connection is a pair of sockets in virtual time: a wait ends once nothing is left to read.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from app.api.connection import Connection, IdleConnections
from tests.virtual_time import run_in_virtual_time

SECONDS = 180
OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
HANDSHAKE = (
    "Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
SECOND = "POST /second HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"


async def _echo(request: Request) -> Response:
    body = await request.body()
    names = sorted(request.headers)
    return JSONResponse([request.method, request.url.path, body.decode(), names])


async def _stream(_: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    return StreamingResponse(pieces())


APP = Starlette(
    routes=[
        Route("/stream", _stream, methods=["GET", "HEAD"]),
        Route("/{path}", _echo, methods=["GET", "POST"]),
    ]
)


@dataclass
class Client:
    """One end of a connection; the service has the other."""

    socket: socket.socket
    is_closed: bool = False
    _received: bytes = field(default=b"", repr=False)

    async def say(self, text: str) -> bytes:
        """Send; returns what the service sends until it waits."""
        self.socket.sendall(text.encode())
        return await self.read()

    async def read(self) -> bytes:
        await asyncio.sleep(0.001)  # virtual: it ends once the service has nothing to read
        received = b""
        while not self.is_closed:
            try:
                received += (piece := self.socket.recv(65_536))
            except BlockingIOError:
                break
            self.is_closed = not piece
        return received


class Clients:
    def __init__(self, most_idle: int = 100) -> None:
        self._config = uvicorn.Config(
            APP, http=Connection, ws="none", lifespan="off", log_config=None,
            timeout_keep_alive=SECONDS,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._idle = IdleConnections(most_idle)
        self._sockets: list[socket.socket] = []

    async def connect(self) -> Client:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._sockets.append(ours)

        def connection() -> Connection:
            return Connection(
                config=self._config, server_state=self._state, app_state={}, idle=self._idle
            )

        await asyncio.get_running_loop().connect_accepted_socket(connection, theirs)
        return Client(ours)

    async def close(self) -> None:
        for one in self._sockets:
            one.close()
        await asyncio.sleep(0.001)  # virtual, as above
        assert not self._state.connections


def run(work: Callable[[Clients], Awaitable[None]], most_idle: int = 100) -> None:
    async def all_of_it() -> None:
        clients = Clients(most_idle)
        await work(clients)
        await clients.close()

    run_in_virtual_time(all_of_it())


def bodies(responses: bytes) -> list[list[object]]:
    """The bodies of responses of `_echo`."""
    found = []
    while responses:
        head, _, rest = responses.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append(orjson.loads(rest[:length])[:3])
        responses = rest[length:]
    return found


BODIES = {
    "length": "Content-Length: 5\r\n\r\nhello",
    "chunks": "Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    "expected": "Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("body", [BODIES["length"], BODIES["chunks"]], ids=["length", "chunks"])
@pytest.mark.parametrize("offer", [OFFER, HANDSHAKE, OFFER.replace("h2c", "websocket, h2c")])
def test_an_offer_is_ignored_wherever_segments_end(offer: str, body: str) -> None:
    request = f"POST /first?a=b HTTP/1.1\r\nHost: h\r\nX-Empty:\r\n{offer}{body}"

    async def work(clients: Clients) -> None:
        for end in range(1, len(request) + 1, 3):
            client = await clients.connect()
            received = await client.say(request[:end])
            received += await client.say(request[end:] + SECOND)
            assert bodies(received) == [["POST", "/first", "hello"], ["POST", "/second", "abc"]], (
                end
            )
            assert not client.is_closed

    run(work)


def test_many_offers_follow_each_other_in_one_segment() -> None:
    async def work(clients: Clients) -> None:
        client = await clients.connect()
        one = f"POST /first HTTP/1.1\r\nHost: h\r\n{OFFER}{BODIES['length']}"
        without = f"GET /get HTTP/1.1\r\nHost: h\r\n{OFFER}\r\n"
        received = bodies(await client.say((one + without) * 20 + SECOND))
        pair = [["POST", "/first", "hello"], ["GET", "/get", ""]]
        assert received == [*pair * 20, ["POST", "/second", "abc"]]

    run(work)


def test_an_ignored_offer_keeps_the_other_headers() -> None:
    async def work(clients: Clients) -> None:
        client = await clients.connect()
        request = f"POST /first HTTP/1.1\r\nHost: h\r\n{OFFER}X-Empty:\r\n{BODIES['expected']}"
        received = await client.say(request)
        assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
        names = orjson.loads(received.rpartition(b"\r\n\r\n")[2])[3]
        assert {"host", "x-empty", "content-length", "expect"} <= set(names)
        assert "upgrade" not in names
        closing = request.replace("Connection: ", "Connection: close, ")
        assert b"connection: close" in await client.say(closing)
        assert client.is_closed

    run(work)


@pytest.mark.parametrize(
    ("path", "member"),
    [("/v1/responses", "error"), ("/v1/messages", "request_id"), ("/results/", "detail")],
)
def test_a_handshake_is_refused_and_what_follows_is_no_request(path: str, member: str) -> None:
    async def work(clients: Clients) -> None:
        for end in ("", SECOND):
            client = await clients.connect()
            received = await client.say(f"GET {path} HTTP/1.1\r\nHost: h\r\n{HANDSHAKE}\r\n{end}")
            head, _, body = received.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"connection: close" in head
            assert member in orjson.loads(body)
            assert client.is_closed

    run(work)


def test_connect_ends_the_connection() -> None:
    async def work(clients: Clients) -> None:
        client = await clients.connect()
        received = await client.say(f"CONNECT h:443 HTTP/1.1\r\nHost: h\r\n\r\n{SECOND}")
        assert received.count(b"HTTP/1.1 ") == 1
        assert client.is_closed

    run(work)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [("GET", "/stream", b"onetwo"), ("GET", "/echo", b'["GET","/echo"'), ("HEAD", "/stream", b"")],
)
def test_http_1_0_gets_a_body_that_ends_with_the_connection(
    method: str, path: str, expected: bytes
) -> None:
    async def work(clients: Clients) -> None:
        client = await clients.connect()
        head, _, body = (await client.say(f"{method} {path} HTTP/1.0\r\n\r\n")).partition(
            b"\r\n\r\n"
        )
        assert b"transfer-encoding" not in head
        assert body.startswith(expected)
        assert bool(body) == bool(expected)
        assert client.is_closed

    run(work)


def test_a_connection_is_kept_between_requests() -> None:
    async def work(clients: Clients) -> None:
        client = await clients.connect()
        for _ in range(3):
            assert await client.say(SECOND)
            await asyncio.sleep(SECONDS - 1)
        await client.say("\r\n")  # no request: it changes nothing
        await asyncio.sleep(SECONDS - 1)
        assert await client.read() == b""
        assert not client.is_closed
        await asyncio.sleep(2)
        await client.read()
        assert client.is_closed

    run(work)


def test_the_oldest_of_too_many_idle_connections_is_closed() -> None:
    async def work(clients: Clients) -> None:
        all_of_them = [await clients.connect() for _ in range(4)]
        first, second, third, busy = all_of_them
        await busy.say(SECOND[:-1])  # its body has not arrived
        for client in (first, second, first, third):
            assert await client.say(SECOND)
            await asyncio.sleep(1)
        for client in all_of_them:
            await client.read()
        assert [client.is_closed for client in all_of_them] == [False, True, False, False]
        assert await busy.say(SECOND[-1])
        await first.read()
        assert first.is_closed
        third.socket.close()
        assert await busy.say(SECOND)
        newest = await clients.connect()
        assert await newest.say(SECOND)
        await busy.read()
        assert not busy.is_closed

    run(work, most_idle=2)
