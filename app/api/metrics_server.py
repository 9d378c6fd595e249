"""HTTP server for /metrics and health on a port of its own, without a token.

It implements the part of HTTP/1.1 that a scrape needs. Above the bound on connections it closes the
oldest, so that a scrape survives a flood of connections that send or read nothing. Metrics reveal each
team's usage, so the port is bound to loopback by default; there the Host header must be an address or
`localhost`, which keeps out pages in a browser (DNS rebinding needs another name).
"""

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterator

import orjson

from app.api.json_codec import JSON, PROBLEM_JSON
from app.core import metrics
from app.core.addresses import is_loopback
from app.core.errors import ServiceError
from app.core.settings import Settings

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 32  # before their request has arrived, and as many after it
_MAX_HEADER_BYTES = 8_192
_REQUEST_TIMEOUT_SECONDS = 5.0  # for the request and its response together
_RETRY_SECONDS = 5.0

_Content = tuple[str, str, bytes]  # status line, media type, body
_Connections = dict[asyncio.StreamWriter, None]  # the oldest first
_TEXT = "text/plain; charset=utf-8"
_OK = "200 OK"


class MetricsServer:
    def __init__(
        self,
        settings: Settings,
        read_metrics: Callable[[], Awaitable[bytes]],
        read_readiness: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`read_readiness` raises ServiceError while the process is not ready."""
        assert settings.metrics_port is not None
        self._host, self._port = settings.metrics_host, settings.metrics_port
        self._is_loopback = is_loopback(settings.metrics_host)
        self._read_metrics = read_metrics
        self._read_readiness = read_readiness
        self._reading: _Connections = {}
        self._responding: _Connections = {}

    async def run(self) -> None:
        """Bind the port as soon as it is free, and serve it until cancelled."""
        is_logged = False
        while True:
            try:
                server = await asyncio.start_server(
                    self._serve, self._host, self._port, limit=_MAX_HEADER_BYTES
                )
            except OSError as error:
                # The previous process may still finish its results; the worker starts without it.
                if not is_logged:
                    logger.warning(
                        "metrics wait for %s:%d (LLM_METRICS_HOST, LLM_METRICS_PORT): %s",
                        *(self._host, self._port, error),
                        extra={"action": "metrics_wait"},
                    )
                is_logged = True
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not self._is_loopback:
                logger.warning(
                    "metrics are served without a token on %s:%d", self._host, self._port
                )
            async with server:
                await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_SECONDS):
                with _registered(self._reading, writer):
                    head = await reader.readuntil(b"\r\n\r\n")
                with _registered(self._responding, writer):
                    status, media_type, body = await self._route(head.decode("latin-1"))
                    writer.write(
                        f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\n"
                        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                    )
                    if not head.startswith(b"HEAD"):
                        writer.write(body)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client disconnected, or sent no request
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _route(self, head: str) -> _Content:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if self._is_loopback and not _is_own(lines):
            return "403 Forbidden", _TEXT, b"The Host header must name an address or localhost.\n"
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _TEXT, b"Only GET.\n"
        if path == "/metrics":
            return _OK, metrics.CONTENT_TYPE, await self._read_metrics()
        if path == "/health/live":
            return _OK, _TEXT, b""
        if path == "/health/ready" and self._read_readiness is not None:
            try:
                return _OK, JSON, orjson.dumps(await self._read_readiness())
            except ServiceError as error:
                problem = orjson.dumps(error.to_problem())
                return "503 Service Unavailable", PROBLEM_JSON, problem
        return "404 Not Found", _TEXT, b"There are /metrics, /health/live and /health/ready.\n"


@contextlib.contextmanager
def _registered(connections: _Connections, writer: asyncio.StreamWriter) -> Iterator[None]:
    """Register a connection; above the bound the oldest one is closed."""
    if len(connections) >= _MAX_CONNECTIONS:
        oldest = next(iter(connections))
        del connections[oldest]
        oldest.transport.abort()
    connections[writer] = None
    try:
        yield
    finally:
        connections.pop(writer, None)


def _is_own(lines: list[str]) -> bool:
    """Check that no name in the Host headers can belong to another site's page."""
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
