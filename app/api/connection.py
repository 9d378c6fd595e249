"""One HTTP connection: uvicorn's, with bounds on its silence, and without changes of the protocol."""

import asyncio
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api.errors.error_responses import refusal_of
from app.core.errors import HttpError

_HEAD_SECONDS = 30.0


class IdleConnections:
    """Connections of one server between two requests: above `most`, the oldest is closed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: dict[Connection, None] = {}  # the oldest first

    def add(self, connection: "Connection") -> None:
        self._connections[connection] = None
        if len(self._connections) > self._most:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.timeout_keep_alive_handler()

    def discard(self, connection: "Connection") -> None:
        self._connections.pop(connection, None)


class Connection(HttpToolsProtocol):
    """Closes a connection whose request head is not complete in time, and bounds the idle ones.

    uvicorn waits indefinitely for the first head: idle connections would use all file descriptors of the
    process, and /health would no longer respond.

    An offer of another protocol (`Upgrade`: curl and Java offer HTTP/2 so) is ignored, as RFC 9110 (7.8)
    permits. The parser takes what follows such a head for the other protocol, and a body would be the next
    request: the head is parsed again without the offer. A WebSocket handshake is refused and
    its connection closed, as what follows it is not HTTP.
    """

    def __init__(self, *args: Any, idle: IdleConnections | None = None, **options: Any) -> None:
        """`idle`: those of the whole server; None: without a bound."""
        super().__init__(*args, **options)
        self._idle = idle
        self._waiting: asyncio.TimerHandle | None = None
        self._is_last = False  # what follows the present request is not HTTP

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)
            return
        if self._is_idle():  # still: an empty line came, or the rest of a refused body
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._register()

    def _parse(self, data: bytes) -> bytes:
        """Parse data; returns what is to be parsed after it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._is_last:
                return b""
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            return head + data[offer.args[0] :]
        return b""

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % one for one in self.headers if one[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))

    def on_message_begin(self) -> None:
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_parsed_again():
            return
        self._stop_waiting()
        self._is_last = self.parser.should_upgrade()
        if self._is_last and self.parser.get_method() != b"CONNECT":
            self.app = _refuse_handshake
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if not self._is_parsed_again():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle():
            self._register()

    def _unset_keepalive_if_required(self) -> None:
        if self._idle is not None:
            self._idle.discard(self)
        super()._unset_keepalive_if_required()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            _delimit_by_close(cycle)
        super()._start_asgi_task(cycle, app)

    def _is_parsed_again(self) -> bool:
        """Return whether the present head has an offer that is ignored."""
        if not self.parser.should_upgrade():
            return False
        method = self.parser.get_method()
        return method != b"CONNECT" and not (method == b"GET" and _is_handshake(self.headers))

    def _is_idle(self) -> bool:
        """Return whether all requests have their responses, and no other has begun."""
        return (
            self.cycle is not None  # type: ignore[redundant-expr] # None before the first request
            and self.cycle.response_complete
            and not self.pipeline
            and self._waiting is None
            and not self.transport.is_closing()
        )

    def _register(self) -> None:
        if self._idle is not None:
            self._idle.add(self)

    def _wait_for_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def _is_handshake(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a request cannot be served in HTTP (RFC 6455, 4.1)."""
    names = {name for name, _ in headers}
    protocols = b",".join(value for name, value in headers if name == b"upgrade").lower()
    return b"sec-websocket-key" in names and b"websocket" in protocols


async def _refuse_handshake(scope: Scope, receive: Receive, send: Send) -> None:
    error = HttpError(
        "The service has no WebSockets. Its streams are server-sent events: send the request without "
        "`Upgrade`."
    )
    await refusal_of(scope, error)(scope, receive, send)


def _delimit_by_close(cycle: RequestResponseCycle) -> None:
    """Send a response as HTTP/1.0 has it: a body without a length ends with the connection.

    uvicorn would send it in chunks, which HTTP/1.0 does not have (RFC 9112, 6.1).
    """
    send_next = cycle.send

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        else:
            cycle.expected_content_length = len(message.get("body", b""))
        await send_next(message)

    cycle.send = send  # type: ignore[method-assign]
