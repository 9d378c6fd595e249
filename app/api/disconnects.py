"""Disconnects: detection, and the X-On-Disconnect header."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.requests import Request

from app.api.sse import until_disconnect
from app.core.errors import invalid_field
from app.queue.enqueue import OnDisconnect

ON_DISCONNECT_HEADER = {
    "X-On-Disconnect": {
        "schema": {"type": "string", "enum": ["cancel", "continue"], "default": "cancel"},
        "description": "Cancel or continue the result if the client disconnects before its end.",
    }
}


@contextlib.contextmanager
def watch_disconnect(request: Request, *woken: asyncio.Event) -> Iterator[Callable[[], bool]]:
    """Set the events when the client disconnects; yields a function that returns whether it has."""
    disconnecting = asyncio.create_task(until_disconnect(request.receive))

    def wake(_: object) -> None:
        for event in woken:
            event.set()

    disconnecting.add_done_callback(wake)
    try:
        yield disconnecting.done
    finally:
        disconnecting.cancel()


def on_disconnect_of(request: Request, default: OnDisconnect) -> OnDisconnect:
    headers = dict(request.scope["headers"])
    given = headers.get(b"x-on-disconnect", default.encode()).strip().lower()
    if given == b"continue":
        return "continue"
    if given == b"cancel":
        return "cancel"
    raise invalid_field("X-On-Disconnect", "must be `continue` or `cancel`")
