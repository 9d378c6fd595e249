"""HTTP server: uvicorn, which ends streams and long-polls when it stops."""

import asyncio
import os
from functools import partial
from socket import socket
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.api.acceptor import Acceptor
from app.core import interpreter_tuning

# Streams and long-polls end at the signal; remaining requests are cut after this.
_GRACE_SECONDS = 5
_HEAD_SECONDS = 30.0


def serve(app: Starlette, host: str, port: int, trusted_proxies: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Forwarded headers (client address, scheme) are accepted from `trusted_proxies` (addresses, networks).
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
            reset_contextvars=True,  # a connection's next request inherits nothing of the last
            forwarded_allow_ips=trusted_proxies,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        ),
    )
    server.run()
    return 0 if server.started else 1


class Connection(HttpToolsProtocol):
    """Closes a connection whose request head is not complete in time.

    uvicorn waits indefinitely for the first head: idle connections would use all file descriptors of the
    process, and /health would no longer respond.
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
        self._take_over()
        interpreter_tuning.settle()

    def _take_over(self) -> None:
        """Accept connections ourselves, with copies of the sockets."""
        connection = partial(
            Connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        taken: list[Any] = []
        for server in self.servers:
            listening = [socket(fileno=os.dup(one.fileno())) for one in server.sockets]
            server.close()
            taken += [Acceptor(one, connection) for one in listening]
        self.servers = taken

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        stop = getattr(self._app.state, "stop", None)
        if stop is not None:  # None before the lifespan has started
            stop()
