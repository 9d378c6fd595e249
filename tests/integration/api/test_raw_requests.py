"""Requests as other clients write them, byte for byte, each followed by a second one on its connection."""

import asyncio
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import pytest
import pytest_asyncio

from app.api.connection import Connection
from app.cli.up.triton import EmbeddedTriton
from tests.integration.support import fresh_database, serve
from tests.postgres import PostgresServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

DATA = tomllib.loads(Path(__file__).with_name("raw_requests.toml").read_text())
REQUESTS = DATA["requests"]


@dataclass
class Served:
    host: str
    port: int
    received: int = 0  # bytes
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def has_received(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.received < count:
                self.arrived.clear()
                await self.arrived.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    postgres_server: PostgresServer, template: str, triton: EmbeddedTriton
) -> AsyncIterator[Served]:
    """The service behind a real socket, and the count of what has come to it."""
    parse = Connection.data_received

    def counting(self: Connection, data: bytes) -> None:
        parse(self, data)
        found.received += len(data)
        found.arrived.set()

    async with fresh_database(postgres_server, template, triton) as settings:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "data_received", counting)
            async with serve(settings, with_worker=True) as service:
                url = service.client.base_url
                found = Served(url.host, url.port or 0)
                yield found


class RawClient:
    def __init__(self, served: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._served, self._reader, self._writer = served, reader, writer
        self._parser = h11.Connection(h11.CLIENT)

    async def send(self, *segments: bytes) -> None:
        """Send each segment after the service has the one before."""
        self._served.received = 0
        sent = 0
        for segment in segments:
            self._writer.write(segment)
            sent += len(segment)
            await self._served.has_received(sent)

    async def receive(self) -> tuple[int, str]:
        """The status and the body of the next response."""
        if self._parser.our_state is not h11.IDLE:
            self._parser.start_next_cycle()
        # The parser reads responses alone: the requests are written by hand.
        self._parser.send(h11.Request(method="POST", target="/", headers=[("host", "h")]))
        self._parser.send(h11.EndOfMessage())
        status, body = 0, b""
        while True:
            event = self._parser.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(30):
                    self._parser.receive_data(await self._reader.read(65_536))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                assert isinstance(event, h11.EndOfMessage), event
                return status, body.decode()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def framed(
    client: str, host: str, request: dict[str, Any], *, chunked: bool
) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    body = request["body"].encode()
    length = "Transfer-encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = DATA["clients"][client]["head"].strip().format(
        path=request["path"], host=host, length=length
    )  # fmt: skip
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return head.replace("\n", "\r\n").encode() + b"\r\n\r\n", body


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("client", [name for name in DATA["clients"] if name != "plain"])
async def test_a_body_is_read_whatever_its_head_offers(
    served: Served, client: str, chunked: bool
) -> None:
    host = f"{served.host}:{served.port}"
    second = b"".join(framed("plain", host, REQUESTS[2], chunked=False))
    for request in REQUESTS:
        head, body = framed(client, host, request, chunked=chunked)
        for *before, last in ((head + body,), (head, body), (head, body + second)):
            raw = RawClient(served, *await asyncio.open_connection(served.host, served.port))
            await raw.send(*before, last)
            status, text = await raw.receive()
            assert status == request["status"], text
            assert request["text"] in text
            if last != body + second:
                await raw.send(second)
            assert (await raw.receive())[0] == REQUESTS[2]["status"]
            await raw.close()
