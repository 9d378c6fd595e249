"""Clients that read results' streams over sockets of their own, and hold the server to its word."""

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.http_client import close

_ANSWER_SECONDS = 60.0
_TERMINAL = ("completed", "failed")
_REST, _LONGEST_REST = 0.02, 0.5  # seconds between a connection that failed and the next try


@dataclass
class StreamReader:
    """Joins one result's text by offsets across connections; each event is checked as it comes."""

    result_id: str
    text: str = ""
    attempt: int = 0
    attempts: list[int] = field(default_factory=list)
    position: str = ""
    result: dict[str, Any] | None = None  # of the terminal event
    deltas: int = 0
    connections: int = 0
    receive_buffer: int | None = None  # bytes that are taken from the server before they are read
    token: str = ""  # the Authorization header, if there is to be one
    news_at: list[float] = field(default_factory=list)  # when each delta came, by the loop's clock

    @property
    def is_over(self) -> bool:
        return self.result is not None

    def take(self, frame: str) -> None:
        """One event, whole: nothing is missing before it and nothing of it is known already."""
        lines = [line for line in frame.split("\n") if not line.startswith((":", "retry:"))]
        if not lines:
            return  # a comment
        parts = dict(line.split(": ", 1) for line in lines)
        data = json.loads(parts["data"])
        assert not self.is_over, f"after the end: {frame}"
        if parts["event"] == "attempt":
            assert data["attempt"] > self.attempt, "an attempt that was over"
            kept = data.get("continued_from", 0)
            assert kept <= len(self.text), f"known: {len(self.text)}, {frame[:200]}"
            self.text, self.attempt = self.text[:kept], data["attempt"]
            self.attempts.append(self.attempt)
        elif parts["event"] == "delta":
            assert self.attempts, "text before its attempt was announced"
            assert data["text"]
            assert data["offset"] == len(self.text), f"known: {len(self.text)}, {frame[:200]}"
            self.text += data["text"]
            # The attempt is in the id: no text of another one is joined to this one's.
            assert parts["id"] == f"{self.attempt}:{len(self.text)}"
            self.deltas += 1
            self.news_at.append(asyncio.get_running_loop().time())
        else:
            assert parts["event"] in _TERMINAL
            assert parts["event"] == data["state"]
            self.result = data
        self.position = parts["id"]

    def check_end(self) -> None:
        """The joined text is the stored one, byte for byte."""
        assert self.result is not None
        stored = self.result["result"] or ""
        assert self.text.encode() == stored.encode()
        assert self.position == f"{self.result['attempt']}:{len(stored) + 1}"
        # As it only grew, all that was ever shown of the last attempt was the beginning of it.
        assert self.attempts == sorted(set(self.attempts))
        assert not self.attempts or self.attempts[-1] == self.result["attempt"]

    async def pause(self) -> None:
        """Called after each block that was read: a slow reader takes its time."""

    async def read(
        self, port: int, most_bytes: float = float("inf"), again: Sequence[int] = ()
    ) -> bool:
        """Read on from where it was; False once there is nothing more (204).

        Leaves after so many bytes, wherever in an event that is. Raises ConnectionError when
        the server went away, or answered with a status of `again`.
        """
        async with open_stream(
            port, self.result_id, self.position, self.receive_buffer, self.token
        ) as (status, blocks):
            if status == 204:
                return False
            if status in again:
                raise ConnectionRefusedError(status)
            assert status == 200, status
            self.connections += 1
            rest, count = bytearray(), 0
            async for block in blocks:
                taken = block[: int(min(len(block), most_bytes - count))]
                count += len(taken)
                begin = max(len(rest) - 1, 0)  # a frame of 8 MB comes in many blocks
                rest += taken
                if rest.find(b"\n\n", begin) >= 0:
                    *frames, rest = rest.split(b"\n\n")
                    for frame in frames:
                        self.take(frame.decode())
                if count >= most_bytes:
                    break
                await self.pause()
        return True

    async def read_to_the_end(
        self,
        port_of: Callable[[], int],
        cuts: Sequence[float] = (),
        again: Sequence[int] = (),
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read until 204, which ends the text, connection after connection.

        Each of the first connections is cut after the given number of bytes; a server that dies,
        or answers with a status of `again`, costs a connection more. Raises OSError where it would
        try again but `gives_up` declines.
        """
        limits = iter(cuts)
        limit: float | None = None
        rest = _REST
        while True:
            if limit is None:
                limit = next(limits, float("inf"))
            try:
                if not await self.read(port_of(), limit, again):
                    return
                limit, rest = None, _REST
            except OSError:
                if gives_up():
                    raise
                await asyncio.sleep(rest)
                rest = min(_LONGEST_REST, rest * 1.5)


def any_of(ports: Sequence[int], seed: object) -> Callable[[], int]:
    """A client's choice among the APIs, made for each connection."""
    chosen = random.Random(str(seed))  # noqa: S311 - not for secrets
    return lambda: chosen.choice(ports)


def random_cuts(seed: object, count: int, most_bytes: int) -> list[float]:
    """The number of bytes to read before each of `count` disconnects; the same for the same seed."""
    chosen = random.Random(str(seed))  # noqa: S311 - not for secrets
    return [chosen.randint(1, most_bytes) for _ in range(count)]


@contextlib.asynccontextmanager
async def open_stream(
    port: int,
    result_id: str,
    position: str = "",
    receive_buffer: int | None = None,
    token: str = "",
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """The status of a stream and its body, block by block, over a connection of its own."""
    known = f"Last-Event-ID: {position}\r\n" if position else ""
    known += f"Authorization: {token}\r\n" if token else ""
    head = f"GET /results/{result_id}/stream HTTP/1.1\r\nHost: localhost\r\n{known}\r\n"
    reader, writer = await _connect(port, receive_buffer)
    try:
        writer.write(head.encode())
        async with asyncio.timeout(_ANSWER_SECONDS):
            try:
                answer = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                raise ConnectionResetError("closed before the answer") from error
        yield int(answer.split()[1]), _blocks(reader)
    finally:
        writer.transport.abort()  # what is still to come is not waited for
        await close(writer)


async def _connect(
    port: int, receive_buffer: int | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if receive_buffer is None:
        return await asyncio.open_connection("127.0.0.1", port)
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=connection, limit=receive_buffer)


async def _blocks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The blocks of a chunked body. Raises ConnectionError where it is broken off."""
    try:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("broken off") from error
