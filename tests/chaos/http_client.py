"""A small HTTP client for hundreds of requests at once: httpx's pool takes seconds for them."""

import asyncio
import contextlib
from http import HTTPStatus
from types import TracebackType
from typing import Any, NamedTuple

import orjson

_ANSWER_SECONDS = 60.0
_IDLE_SECONDS = 3.0  # the server closes connections that were idle for five


class Answer(NamedTuple):
    """A status and the JSON that came with it."""

    status: int
    json: Any


class HttpClient:
    """Keeps up to `connections` of them open to one server. Use it inside `async with`."""

    def __init__(self, host: str, port: int, connections: int) -> None:
        self._host = host
        self._port = port
        self._slots = asyncio.Semaphore(connections)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = []

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for _, writer, _ in self._idle:
            await close(writer)

    async def get(self, path: str) -> Answer:
        return await self._request("GET", path, b"")

    async def post(self, path: str, body: object) -> Answer:
        return await self._request("POST", path, orjson.dumps(body))

    async def _request(self, method: str, path: str, body: bytes) -> Answer:
        """Raises ConnectionError when the server went away before it answered."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with self._slots, asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await self._connection()
            try:
                writer.write(head.encode() + body)
                answer = await _read(reader)
            except BaseException as error:
                await close(writer)
                if isinstance(error, asyncio.IncompleteReadError):
                    raise ConnectionResetError("closed before the answer was complete") from error
                raise
            if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                self._idle.append((reader, writer, asyncio.get_running_loop().time()))
            else:  # the server closes the connection after it
                await close(writer)
        return answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """An idle connection that the server has not closed and is not about to, or a new one."""
        while self._idle:
            reader, writer, since = self._idle.pop()
            age = asyncio.get_running_loop().time() - since
            if age < _IDLE_SECONDS and not reader.at_eof():
                return reader, writer
            await close(writer)
        return await asyncio.open_connection(self._host, self._port)


async def _read(reader: asyncio.StreamReader) -> Answer:
    status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    length = next(
        int(value)
        for name, _, value in (line.partition(":") for line in headers)
        if name.lower() == "content-length"
    )
    return Answer(int(status.split()[1]), orjson.loads(await reader.readexactly(length)))


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection in any state."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
