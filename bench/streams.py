"""Readers of streams that note when each chunk was made and when it was here.

The prompt's `{{clock ...}}` has the scripted model output the time of the step that made a chunk, in ns
of CLOCK_MONOTONIC, which all processes of a machine share: no reader has to guess what it waited for.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import grpc
import orjson
from tritonclient.grpc import service_pb2

from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_access import grpc_headers
from app.inference.triton_messages import build_request
from bench.load import HOST, get, post
from bench.servers import MODEL

PARAMETERS = {"max_tokens": 1024, "temperature": 0}
EVENT_STREAM = "text/event-stream"
_ACCEPT = f"Accept: {EVENT_STREAM}\r\n"


@dataclass(slots=True)
class Stream:
    """One generation as its reader saw it; times in ns of CLOCK_MONOTONIC."""

    began: int
    accepted: int = 0  # when the POST was answered
    made: list[int] = field(default_factory=list)  # by the model, chunk by chunk
    seen: list[int] = field(default_factory=list)  # by the reader
    ended: int = 0  # when the reader held the end
    result: dict[str, Any] = field(default_factory=dict)  # the terminal one

    def see(self, text: str) -> None:
        """Note what has just arrived: one chunk, or several in one event."""
        now = time.monotonic_ns()
        for chunk in text.split():
            self.made.append(int(chunk))
            self.seen.append(now)


Read = Callable[[], Awaitable[Stream]]


@dataclass(slots=True)
class Answer:
    """The head of an HTTP answer, and its body unless it is a stream."""

    status: int
    head: bytes
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        return EVENT_STREAM.encode() in self.head


class HttpClient:
    """One keep-alive connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes) -> Answer:
        """Send a request and read its answer; the caller reads the events of a stream."""
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        answer = Answer(int(head[9:12]), head)
        if not answer.is_stream:
            _, found, rest = head.partition(b"content-length: ")
            if found:
                answer.body = await self._reader.readexactly(int(rest.split(b"\r")[0]))
        return answer

    async def events(self) -> AsyncIterator[tuple[str, bytes]]:
        """Names and data of the events of a stream, to its end."""
        text = b""
        while size := int(await self._reader.readline(), 16):
            text += (await self._reader.readexactly(size + 2))[:-2]
            *frames, text = text.split(b"\n\n")
            for frame in frames:
                lines = dict(line.partition(b": ")[::2] for line in frame.split(b"\n"))
                if b"event" in lines:  # else a comment
                    yield lines[b"event"].decode(), lines[b"data"]
        await self._reader.readline()

    async def read(self, prompt: str, *, in_one_call: bool) -> Stream:
        """Submit and stream to the end: a POST that is the stream, or a POST and then a GET."""
        stream = Stream(time.monotonic_ns())
        answer = await self.ask(submission(prompt, _ACCEPT if in_one_call else ""))
        stream.accepted = time.monotonic_ns()
        if not in_one_call:
            identifier = orjson.loads(answer.body)["id"]
            answer = await self.ask(get(f"/results/{identifier}/stream"))
        if not answer.is_stream:
            raise RuntimeError(f"no stream: {answer.head!r} {answer.body[:400]!r}")
        async for name, data in self.events():
            if name == "delta":
                stream.see(orjson.loads(data)["text"])
            elif name in ("completed", "failed"):
                stream.ended = time.monotonic_ns()
                stream.result = orjson.loads(data)
        if stream.result.get("state") != "completed":
            raise RuntimeError(f"not completed: {stream.result}")
        return stream

    def close(self) -> None:
        self._writer.close()


def at_database(stream: Stream, name: str) -> int:
    """A time of the terminal result as CLOCK_MONOTONIC: the database's clock is this machine's."""
    moment = datetime.fromisoformat(stream.result[name]).timestamp()
    return int(moment * 1e9) - (time.time_ns() - time.monotonic_ns())


def submission(prompt: str, headers: str = "", model: str = MODEL) -> bytes:
    """The POST of one prompt."""
    body = {"model": model, "content": prompt, "parameters": PARAMETERS}
    return post("/results/", orjson.dumps(body), headers)


@contextlib.asynccontextmanager
async def http_clients(port: int, count: int) -> AsyncIterator[list[HttpClient]]:
    """So many connections; closed at the end."""
    clients = [HttpClient(*await asyncio.open_connection(HOST, port)) for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


async def posts_stream(port: int) -> bool:
    """Return True if this service answers a POST with the stream itself."""
    async with http_clients(port, 1) as (client,):
        return (await client.ask(submission("{{chunks=1}}", _ACCEPT))).is_stream


class DirectClient:
    """The least there is: one gRPC stream a generation."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._headers = grpc_headers(secret)
        self._infer = channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    async def read(self, prompt: str) -> Stream:
        """Generate to the end."""
        stream = Stream(time.monotonic_ns())
        request = build_request(MODEL, prompt, PARAMETERS)
        async for answer in self._infer(request, metadata=self._headers):
            if answer.error_message:
                raise RuntimeError(answer.error_message)
            if contents := answer.infer_response.raw_output_contents:
                stream.see(contents[0][4:].decode())
        stream.ended = time.monotonic_ns()
        return stream


@contextlib.asynccontextmanager
async def direct_client(triton: EmbeddedTriton) -> AsyncIterator[DirectClient]:
    """A client of Triton itself."""
    async with grpc.aio.insecure_channel(triton.address("grpc")) as channel:
        yield DirectClient(channel, triton.secret)


async def repeat(reads: Sequence[Read], seconds: float, length: float) -> list[Stream]:
    """Closed loops side by side, one a reader, their beginnings spread over a stream's `length`."""
    done: list[Stream] = []
    ends = time.monotonic() + length + seconds

    async def loop(number: int, read: Read) -> None:
        await asyncio.sleep(number / len(reads) * length)
        while time.monotonic() < ends:
            done.append(await read())

    await asyncio.gather(*(loop(number, read) for number, read in enumerate(reads)))
    return done
