"""A receiver of webhooks on a real socket, whose answers a test chooses; and a deliverer."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from standardwebhooks import Webhook

from app.api.container import Services, open_services
from app.core.settings import Settings
from app.core.url_guard import Lookup
from app.webhooks.delivery import WebhookDeliverer
from app.webhooks.sender import Sender

SHORT = (0.05,) * 9


@dataclass
class Call:
    """One request that a receiver got."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def verify(self, secret: str) -> Any:
        """The event, if the public package accepts it."""
        return Webhook(secret).verify(self.body, self.headers)


Respond = Callable[[Call, asyncio.StreamWriter], Awaitable[None]]


def answer(status: int, *headers: str, body: bytes = b"") -> Respond:
    """Answers of one kind."""

    async def respond(_: Call, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return respond


async def silence(_: Call, writer: asyncio.StreamWriter) -> None:
    """Never an answer."""
    await asyncio.sleep(60)  # longer than any time-out of a call


@dataclass
class Receiver:
    """The requests received, and the responses: `turns` one after another, then `respond`."""

    port: int
    scheme: str = "http"
    calls: list[Call] = field(default_factory=list)
    turns: list[Respond] = field(default_factory=list)
    respond: Respond = field(default_factory=lambda: answer(204))
    most_at_once: int = 0
    _now: int = 0

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hook"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *rest = head.strip().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (r.partition(":") for r in rest)
                }
                call = Call(
                    line, headers, await reader.readexactly(int(headers.get("content-length", "0")))
                )
                self.calls.append(call)
                await (self.turns.pop(0) if self.turns else self.respond)(call, writer)
        finally:
            self._now -= 1
            writer.close()


@contextlib.asynccontextmanager
async def receiving(
    *turns: Respond, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    """A receiver on 127.0.0.1; connections that are open at the end are cut."""
    receiver = Receiver(port, "https" if tls else "http", turns=list(turns))
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await receiver.serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=tls, backlog=1000)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def delivering(
    settings: Settings, schedule: Sequence[float] = SHORT, lookup: Lookup = socket.getaddrinfo
) -> AsyncIterator[Services]:
    """The part of a worker process that delivers."""
    async with open_services(settings, "test") as services:
        deliverer = WebhookDeliverer(
            services.outbox,
            services.results,
            services.jobs,
            services.registry,
            services.listener,
            Sender(settings, lookup),
            schedule,
        )
        tasks = [
            asyncio.create_task(services.listener.run()),
            asyncio.create_task(deliverer.run()),
        ]
        try:
            yield services
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
