"""A reverse proxy before the API that cuts streams, and serves a page from the same origin."""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field

from tests.listening import listening

_BLOCK = 65_536
_NOT_KEPT = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LAST_EVENT_ID = re.compile(rb"\r\nlast-event-id: *(\S+)", re.IGNORECASE)
_AFTER = re.compile(rb"[?&]after=([^& ]+)")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


@dataclass
class CuttingHttpProxy:
    """Passes requests on to `port`, one a connection.

    The bodies of streams (`cut_paths`) end after the numbers of bytes in `cuts`, one after the other; every second
    time by a reset. `pages` are served here, and what is sent to `/outcome` ends up in `outcome`.
    """

    upstream: int
    cuts: Iterable[int] = ()
    pages: Mapping[str, bytes] = field(default_factory=dict)
    cut_paths: tuple[str, ...] = ("/stream",)  # ends of paths
    port: int = 0
    cut: int = 0
    statuses: list[int] = field(default_factory=list)  # of streams
    positions: list[str] = field(default_factory=list)  # where streams were to go on
    paths: list[str] = field(default_factory=list)
    was_refused: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Listen on a port of 127.0.0.1."""
        self._left = iter(self.cuts)
        async with listening(self._serve) as self.port:
            yield

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                await self._answer(head, body, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        path = head.split(b" ", 2)[1].decode()
        self.paths.append(path)
        page = self.pages.get(path.partition("?")[0])
        if path == "/outcome":
            self.outcome.put_nowait(body)
            writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        elif page is not None:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(page), page)
            )
        else:
            await self._pass_on(path, head, body, writer)

    async def _pass_on(
        self, path: str, head: bytes, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        from_service, to_service = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            head = _NOT_KEPT.sub(b"", head)
            to_service.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            answer = await from_service.readuntil(b"\r\n\r\n")
            writer.write(answer)
            room: int | None = None
            if path.partition("?")[0].endswith(self.cut_paths):
                room = self._note(head, int(answer.split(b" ", 2)[1]))
            await self._pass_body(from_service, writer, room)
        finally:
            to_service.close()
            with contextlib.suppress(OSError):
                await to_service.wait_closed()

    def _note(self, head: bytes, status: int) -> int | None:
        """Note a stream's request and answer; after how many bytes it is cut."""
        position = _LAST_EVENT_ID.search(head) or _AFTER.search(head)
        if position is not None:
            self.positions.append(position[1].decode())
        self.statuses.append(status)
        if status != 200:
            self.was_refused.set()
            return None
        return next(self._left, None)

    async def _pass_body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: int | None
    ) -> None:
        while block := await reader.read(_BLOCK if room is None else max(1, min(room, _BLOCK))):
            if room is not None:
                block, room = block[:room], room - len(block)
            writer.write(block)
            await writer.drain()
            if room is not None and room <= 0:
                self.cut += 1
                if self.cut % 2:
                    connection: socket.socket = writer.get_extra_info("socket")
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return
