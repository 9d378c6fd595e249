"""Readers of event streams that cost little: raw sockets in processes of their own.

    python -m bench.sse_readers < ORDER

opens a connection for each request of ORDER, a JSON object (see `_Order`), sends it, reads its
events to the end, and prints the streams as JSON. While they run, a piece of a stream is
stored with the time of its arrival, and nothing else; the events are read from the pieces afterwards.
"""

import asyncio
import itertools
import re
import select
import socket
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from bench.load import HOST
from bench.streams import Stream

_DELTA = re.compile(rb"event: delta\nid: [^\n]*\ndata: ([^\n]*)\n")
_END = re.compile(rb"event: (?:completed|failed)\nid: [^\n]*\ndata: ([^\n]*)\n")
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_PIECE_BYTES = 1 << 16

Piece = tuple[int, bytes]  # time of its arrival in ns of CLOCK_MONOTONIC


@dataclass(slots=True, frozen=True)
class _Order:
    """Requests of streams from one server; `has_clock`: the text is the times of the tokens."""

    port: int
    requests: Sequence[str]
    has_clock: bool


async def read_streams(
    port: int, requests: Sequence[bytes], processes: int, *, has_clock: bool = True
) -> list[Stream]:
    """Read the streams of all requests at the same time, by so many processes."""
    shares = [requests[number::processes] for number in range(processes)]
    orders = [_Order(port, [one.decode() for one in share], has_clock) for share in shares]
    found = await asyncio.gather(*(_run(order) for order in orders))
    return list(itertools.chain.from_iterable(found))


async def _run(order: _Order) -> list[Stream]:
    with tempfile.TemporaryFile() as output:  # a pipe of uvloop has once lost the end
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.sse_readers"),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            cwd=Path(__file__).parents[1],
        )
        try:
            await process.communicate(orjson.dumps(asdict(order)))
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode != 0:
            raise RuntimeError("a reader of streams failed; see above")
        output.seek(0)
        return [Stream(**stream) for stream in orjson.loads(output.read())]


class _Reader:
    """One request, and the pieces of its stream."""

    def __init__(self, port: int, request: str) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.began = time.monotonic_ns()
        self.pieces: list[Piece] = []
        self._tail = b""
        self.socket.sendall(request.encode())
        self.socket.setblocking(False)

    def receive(self) -> bool:
        """Store what has arrived; True at the end of the stream."""
        piece = self.socket.recv(_PIECE_BYTES)
        if not piece or (not self.pieces and piece[9:12] != b"200"):
            raise RuntimeError(f"no stream, or it was cut off: {piece[:400]!r}")
        self.pieces.append((time.monotonic_ns(), piece))
        self._tail = (self._tail + piece)[-len(_LAST_CHUNK) :]
        return self._tail == _LAST_CHUNK


def to_stream(began: int, pieces: Sequence[Piece], *, has_clock: bool) -> Stream:
    """The events of these pieces: the result at the end, and with `has_clock` when each token was made and
    when its last character arrived. Raises RuntimeError for a result that is not completed.
    """
    body = b"".join(piece for _, piece in pieces)
    ends = list(itertools.accumulate(len(piece) for _, piece in pieces))
    stream = Stream(began, accepted=pieces[0][0], ended=pieces[-1][0])
    last = _END.search(body)
    stream.result = orjson.loads(last[1]) if last else {}
    if stream.result.get("state") != "completed":
        raise RuntimeError(f"not completed: {body[-400:]!r}")
    if not has_clock:
        return stream
    text, lengths, arrivals = "", [], []
    for delta in _DELTA.finditer(body):
        text += orjson.loads(delta[1])["text"]
        lengths.append(len(text))
        arrivals.append(pieces[bisect_left(ends, delta.end())][0])
    for token in re.finditer(r"\S+", text):
        stream.made.append(int(token[0]))
        stream.seen.append(arrivals[bisect_left(lengths, token.end())])
    return stream


def main(order: _Order) -> list[Stream]:
    """Read all streams to their ends."""
    readers = [_Reader(order.port, request) for request in order.requests]
    by_file = {reader.socket.fileno(): reader for reader in readers}
    poll = select.epoll()
    for file in by_file:
        poll.register(file, select.EPOLLIN)
    while by_file:
        for file, _ in poll.poll():
            if by_file[file].receive():
                poll.unregister(file)
                del by_file[file]
    return [to_stream(one.began, one.pieces, has_clock=order.has_clock) for one in readers]


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(main(_Order(**orjson.loads(sys.stdin.buffer.read())))))
