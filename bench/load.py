"""A closed-loop HTTP/1.1 client that costs next to nothing: raw bytes on keep-alive connections.

It knows what this service and its baselines answer, no more: a Content-Length in every response.
"""

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import cast

HOST = "127.0.0.1"
_TAIL_SECONDS = 60.0  # for the answers that are under way when the time is over


@dataclass(slots=True)
class Load:
    """Result of a stretch of load. `count` includes the tail; `rate` is of the time asked for."""

    count: int = 0
    rate: float = 0.0
    latencies: list[float] = field(default_factory=list)  # seconds

    def milliseconds(self, share: float) -> float:
        """A percentile of the latencies, by nearest rank."""
        ordered = sorted(self.latencies)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1000

    def median_milliseconds(self) -> float:
        return statistics.median(self.latencies) * 1000


def get(path: str) -> bytes:
    """A GET request as bytes."""
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """A POST request with a JSON body as bytes; `headers` end in CRLF each."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n{headers}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class Callers:
    """Open connections to one server, each of which sends its next request after an answer."""

    def __init__(self, connections: list["_Connection"]) -> None:
        self._connections = connections

    async def run(
        self, next_request: Callable[[], bytes], seconds: float, expected: tuple[int, ...]
    ) -> Load:
        """Send for so many seconds. Raises RuntimeError at the first status not `expected`."""
        load = Load()
        began = time.perf_counter()
        ends = began + seconds
        statuses = tuple(str(status).encode() for status in expected)
        done = [
            connection.start(next_request, ends, statuses, load) for connection in self._connections
        ]
        async with asyncio.timeout(seconds + _TAIL_SECONDS):
            await asyncio.gather(*done)
        load.count = len(load.latencies)
        load.rate = load.rate / seconds
        return load

    def send_once(self, next_request: Callable[[], bytes]) -> None:
        """Send one request on each connection, and wait for nothing."""
        for connection in self._connections:
            connection.send(next_request())

    def refused(self) -> list[bytes]:
        """A response to `send_once` other than 200."""
        return [one.refusal for one in self._connections if one.refusal]


@contextlib.asynccontextmanager
async def connect(port: int, callers: int, host: str = HOST) -> AsyncIterator[Callers]:
    """Open `callers` connections; closed at the end."""
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(_Connection, host, port))[1] for _ in range(callers)
    ]
    try:
        yield Callers(connections)
    finally:
        for connection in connections:
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""
        self._done: asyncio.Future[None] | None = None
        self.refusal = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("closed by the server"))

    def start(
        self,
        next_request: Callable[[], bytes],
        ends: float,
        statuses: tuple[bytes, ...],
        load: Load,
    ) -> asyncio.Future[None]:
        self._next_request, self._ends, self._statuses = next_request, ends, statuses
        self._load = load
        self._done = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        self.send(next_request())
        return self._done

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    def close(self) -> None:
        self._done = None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        body = data.find(b"\r\n\r\n") + 4
        if body < 4 or len(data) < body + _content_length(data, body):
            self._buffer = data
            return
        self._buffer = b""
        if self._done is not None:
            self._answered(data)
        elif data.startswith(b"HTTP") and data[9:12] != b"200":
            self.refusal = data[:600]

    def _answered(self, data: bytes) -> None:
        assert self._done is not None
        if data[9:12] not in self._statuses:
            if not self._done.done():
                self._done.set_exception(RuntimeError(f"unexpected answer: {data[:600]!r}"))
            return
        now = time.perf_counter()
        self._load.latencies.append(now - self._began)
        if now < self._ends:
            self._load.rate += 1
            self._began = now
            self._transport.write(self._next_request())
        else:
            self._done.set_result(None)


def _content_length(data: bytes, body: int) -> int:
    start = data.find(b"content-length: ", 0, body) + 16
    return int(data[start : data.find(b"\r", start)]) if start >= 16 else 0
