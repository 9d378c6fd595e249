"""A TCP proxy before PostgreSQL that cuts connections at the commit of a statement."""

import asyncio
import contextlib
import itertools
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from enum import Enum

from tests.listening import listening

_SSL_REQUEST = 80_877_103
_READY_FOR_QUERY = b"Z\x00\x00\x00\x05"  # the state of the transaction follows


class Cut(Enum):
    """The point at which a connection is cut, relative to the statement that is under way on it."""

    BEFORE = "the statement never reaches the server"
    UNCOMMITTED = "it runs, but the message that commits it never arrives"
    UNKNOWN = "the connection breaks the moment the commit was asked for"
    ANSWER_LOST = "it is committed, but the answer never arrives"


class CuttingProxy:
    """Passes everything on, but for statements in whose values `marker` is found.

    A statement is a Bind message, what follows it, and a Sync, which commits. `fates` decides about one
    marked statement after another where it is cut; None lets it pass.
    """

    def __init__(
        self,
        host: str,
        port: int,
        marker: re.Pattern[bytes],
        fates: Iterable[Cut | None],
        limit: int,
    ) -> None:
        self._address = (host, port)
        self._marker = marker
        self._fates = itertools.cycle(fates)
        self._limit = limit
        self.cuts: Counter[Cut] = Counter()
        self.all_cut = asyncio.Event()
        self.port = 0

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Listen on a port of 127.0.0.1."""
        async with listening(self._serve) as self.port:
            yield

    async def _serve(
        self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        from_server, to_server = await asyncio.open_connection(*self._address)
        answering = asyncio.create_task(_pass_on(from_server, to_client))
        try:
            await _pass_start(from_client, to_server)
            cut = await self._pass_statements(from_client, to_server)
            if cut is Cut.ANSWER_LOST:
                answering.cancel()  # nothing was under way on it before this statement
                await asyncio.gather(answering, return_exceptions=True)
                to_server.write(_SYNC)
                await from_server.readuntil(_READY_FOR_QUERY)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # one side has gone: so does the other
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            for writer in (to_client, to_server):
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _pass_statements(
        self, from_client: asyncio.StreamReader, to_server: asyncio.StreamWriter
    ) -> Cut:
        """Pass messages on until the connection is to be cut; returns the way."""
        fate: Cut | None = None
        while True:
            kind = await from_client.readexactly(1)
            body = await _read_body(from_client)
            if kind == b"B" and self._marker.search(body):
                fate = next(self._fates) if self.cuts.total() < self._limit else None
            if fate is Cut.BEFORE or (fate and kind == b"S"):
                self._count(fate)
                if fate is Cut.UNKNOWN:
                    to_server.write(_SYNC)
                    await to_server.drain()
                return fate
            to_server.write(kind + struct.pack(">I", len(body) + 4) + body)
            await to_server.drain()

    def _count(self, cut: Cut) -> None:
        self.cuts[cut] += 1
        if self.cuts.total() >= self._limit:
            self.all_cut.set()


_SYNC = b"S\x00\x00\x00\x04"


async def _pass_start(from_client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
    """The first messages have no type: a request for TLS perhaps, then the start-up itself."""
    while True:
        body = await _read_body(from_client)
        to_server.write(struct.pack(">I", len(body) + 4) + body)
        if struct.unpack(">I", body[:4]) != (_SSL_REQUEST,):
            return


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return await reader.readexactly(length - 4)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while block := await reader.read(65_536):
            writer.write(block)
            await writer.drain()
        writer.close()
