"""The HTTP server: uvicorn, told to stop its streams and long-polls when it stops itself."""

import asyncio
from socket import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.core import gc_tuning

# Streams and long-polls leave at the signal; what is left after this is cut.
_GRACE_SECONDS = 5
_HEAD_SECONDS = 30.0


def serve(app: Starlette, host: str, port: int, trusted_proxies: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Of `trusted_proxies` (addresses, networks) it is believed whom they speak for, and over which scheme.
    """
    server = _Server(
        app,
        uvicorn.Config(
            app,
            host=host,
            port=port,
            loop="uvloop",
            http=Connection,
            ws="none",
            access_log=False,
            server_header=False,
            log_config=None,
            forwarded_allow_ips=trusted_proxies,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        ),
    )
    server.run()
    return 0 if server.started else 1


class Connection(HttpToolsProtocol):
    """Closed when a request's head does not come whole in time.

    uvicorn waits for ever for the first one: connections that ask nothing would hold all file
    descriptors of the process, and /health would be answered no more.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        gc_tuning.settle()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        stop = getattr(self._app.state, "stop", None)
        if stop is not None:  # else it has not started
            stop()
