"""The HTTP server: uvicorn, told to stop its streams and long-polls when it stops itself."""

from socket import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from app import garbage

# Streams and long-polls leave at the signal; what is left after this is cut.
_GRACE_SECONDS = 5


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
            http="httptools",
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


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        garbage.settle()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        stop = getattr(self._app.state, "stop", None)
        if stop is not None:  # else it has not started
            stop()
