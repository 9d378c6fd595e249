"""A port of its own for /metrics, without a token: the worker's only one.

It speaks as much HTTP/1.1 as a scrape needs. Of too many connections the oldest one is closed, so that
a scrape gets through a flood of those that ask nothing, and of those that do not read. Who may reach it may know how much each team uses, so it
is bound to loopback unless a setting says otherwise; there a page in a browser is kept out by its Host
header, which names an address or `localhost` (DNS rebinding needs another name).
"""

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Iterator
from typing import Protocol

import orjson

from app.api.json_codec import JSON, PROBLEM_JSON
from app.core import metrics
from app.core.addresses import is_loopback
from app.core.errors import ServiceError
from app.core.settings import Settings

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 32  # without a request as yet, and as many that are being answered
_MOST_HEADER_BYTES = 8_192
_PATIENCE = 5.0  # seconds for a request to arrive, and for its answer to leave
_RETRY_SECONDS = 5.0

_Answer = tuple[str, str, bytes]  # status line, media type, body
_Connections = dict[asyncio.StreamWriter, None]  # the oldest first
_TEXT = "text/plain; charset=utf-8"
_OK = "200 OK"


class Text(Protocol):
    """What there is to tell."""

    async def text(self) -> bytes: ...


class Report(Protocol):
    """Which parts are up."""

    async def report(self) -> dict[str, object]: ...


class MetricsServer:
    """Serves until cancelled."""

    def __init__(
        self, settings: Settings, exposition: Text, readiness: Report | None = None
    ) -> None:
        assert settings.metrics_port is not None
        self._host, self._port = settings.metrics_host, settings.metrics_port
        self._is_loopback = is_loopback(settings.metrics_host)
        self._exposition = exposition
        self._readiness = readiness
        self._asking: _Connections = {}
        self._answered: _Connections = {}

    async def run(self) -> None:
        """Bind the port, as soon as it is free, and serve it."""
        told = False
        while True:
            try:
                server = await asyncio.start_server(
                    self._serve, self._host, self._port, limit=_MOST_HEADER_BYTES
                )
            except OSError as error:
                # The process before this one may still finish its results: no reason not to work.
                if not told:
                    logger.warning(
                        "metrics wait for %s:%d (LLM_METRICS_HOST, LLM_METRICS_PORT): %s",
                        *(self._host, self._port, error),
                        extra={"action": "metrics_wait"},
                    )
                told = True
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not self._is_loopback:
                logger.warning(
                    "metrics are told on %s:%d to everyone who reaches it", self._host, self._port
                )
            async with server:
                await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                with _among(self._asking, writer):
                    head = await reader.readuntil(b"\r\n\r\n")
                with _among(self._answered, writer):
                    status, media_type, body = await self._answer(head.decode("latin-1"))
                    writer.write(
                        f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\n"
                        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                    )
                    if not head.startswith(b"HEAD"):
                        writer.write(body)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever it was has left, or sends no request
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: str) -> _Answer:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if self._is_loopback and not _is_own(lines):
            return "403 Forbidden", _TEXT, b"The Host header must name an address or localhost.\n"
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _TEXT, b"Only GET.\n"
        if path == "/metrics":
            return _OK, metrics.CONTENT_TYPE, await self._exposition.text()
        if path == "/health/live":
            return _OK, _TEXT, b""
        if path == "/health/ready" and self._readiness is not None:
            try:
                return _OK, JSON, orjson.dumps(await self._readiness.report())
            except ServiceError as error:
                problem = orjson.dumps(error.to_problem())
                return "503 Service Unavailable", PROBLEM_JSON, problem
        return "404 Not Found", _TEXT, b"There are /metrics, /health/live and /health/ready.\n"


@contextlib.contextmanager
def _among(connections: _Connections, writer: asyncio.StreamWriter) -> Iterator[None]:
    """Have a connection among these; if they are too many, the oldest is closed for it."""
    if len(connections) >= _MOST_CONNECTIONS:
        oldest = next(iter(connections))
        del connections[oldest]
        oldest.transport.abort()
    connections[writer] = None
    try:
        yield
    finally:
        connections.pop(writer, None)


def _is_own(lines: list[str]) -> bool:
    """Whether the Host is one that no other site's page can have."""
    hosts = [
        line.partition(":")[2].strip() for line in lines if line.lower().startswith("host:")
    ] or [""]
    return all(_is_address(host) for host in hosts)


def _is_address(host: str) -> bool:
    is_version_6 = host.startswith("[")
    name = host[1:].partition("]")[0] if is_version_6 else host.partition(":")[0]
    if name.lower() in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
