"""HTTP server: uvicorn, which ends streams and long-polls when it stops."""

import os
from functools import partial
from socket import socket
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from app.api.acceptor import Acceptor
from app.api.connection import Connection, IdleConnections
from app.core import interpreter_tuning

# Streams and long-polls end at the signal; remaining requests are cut after this.
_GRACE_SECONDS = 5


class Listening(Protocol):
    """Settings of a server.

    Forwarded headers (client address, scheme) are accepted from `trusted_proxies` (addresses, networks).
    """

    host: str
    port: int
    trusted_proxies: list[str]
    idle_connection_seconds: int
    max_idle_connections: int


def serve(app: Starlette, settings: Listening) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=Connection,
        ws="none",
        access_log=False,
        server_header=False,
        log_config=None,
        reset_contextvars=True,  # a connection's next request inherits nothing of the last
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_keep_alive=settings.idle_connection_seconds,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(app, config, IdleConnections(settings.max_idle_connections))
    server.run()
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    def __init__(
        self, app: Starlette, config: uvicorn.Config, idle: IdleConnections | None = None
    ) -> None:
        super().__init__(config)
        self._app = app
        self._idle = idle

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
            idle=self._idle,
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
