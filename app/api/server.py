"""HTTP server: uvicorn, which ends streams and long-polls when it stops."""

import asyncio
import os
from functools import partial
from socket import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.core import interpreter_tuning

# Streams and long-polls end at the signal; remaining requests are cut after this.
_GRACE_SECONDS = 5
_HEAD_SECONDS = 30.0
_ACCEPTS = 16  # connections in a round of the event loop


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
        await self._accept_more()
        interpreter_tuning.settle()

    async def _accept_more(self) -> None:
        """Listen with copies of each socket: libuv accepts one connection of each in a round of the loop.

        (Since 1.45: https://github.com/libuv/libuv/pull/3696.) A thousand connections at once would
        delay the next client by a thousand rounds.
        """
        loop = asyncio.get_running_loop()
        connection = partial(
            Connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for listening in [one for server in self.servers for one in server.sockets]:
            for _ in range(_ACCEPTS - 1):
                copy = socket(fileno=os.dup(listening.fileno()))
                self.servers.append(
                    await loop.create_server(connection, sock=copy, backlog=self.config.backlog)
                )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        stop = getattr(self._app.state, "stop", None)
        if stop is not None:  # None before the lifespan has started
            stop()
