"""HTTP/1.1 with a connection for each request, so that a connection's end is a request's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.chaos.http_client import close

ANSWER_SECONDS = 60.0  # longer than any wait that is asked for, and any bound of the service's
SILENCE_SECONDS = 45.0  # streams send a keep-alive every fifteen


class NoAnswerError(Exception):
    """The server kept a client waiting longer than it ever may."""


@dataclass
class Reply:
    """The head of an answer, and its body to be read."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader = field(repr=False)

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ConnectionError where it is broken off."""
        try:
            if "content-length" in self.headers:
                left = int(self.headers["content-length"])
                if left:
                    yield await self._timed(self.reader.readexactly(left))
                return
            while size := int(await self._timed(self.reader.readuntil(b"\r\n")), 16):
                yield (await self._timed(self.reader.readexactly(size + 2)))[:-2]
            await self._timed(self.reader.readexactly(2))
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionResetError("broken off") from error

    async def read(self) -> bytes:
        return b"".join([block async for block in self.blocks()])

    async def json(self) -> Any:
        return orjson.loads(await self.read())

    async def _timed(self, reading: Any) -> bytes:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                return bytes(await reading)
        except TimeoutError:
            raise NoAnswerError(f"silent for {SILENCE_SECONDS:.0f} s in its body") from None


@contextlib.asynccontextmanager
async def ask(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    *,
    source: str = "127.0.0.1",
) -> AsyncIterator[Reply]:
    """Send one request from an address. Raises ConnectionError (OSError) or `NoAnswerError`."""
    content = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
    lines = {"Host": "localhost", "Content-Length": str(len(content)), "Connection": "close"}
    lines |= {"Content-Type": "application/json"} | dict(headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        yield await _read_head(reader)
    finally:
        writer.transport.abort()
        await close(writer)


async def _read_head(reader: asyncio.StreamReader) -> Reply:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("closed before the answer") from error
    except TimeoutError:
        raise NoAnswerError(f"no answer in {ANSWER_SECONDS:.0f} s") from None
    status, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return Reply(int(status.split()[1]), headers, reader)
