"""Server-sent events over ASGI: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.core.json_lines import on_one_line
from app.core.waiting import cancel_all

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
# Not followed by an empty line, which some clients read as an event without data.
KEEP_ALIVE = b": keep-alive\n"
# Delay before a browser reconnects.
RETRY_MILLISECONDS = 1000

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # proxies such as nginx forward each event at once
}


def encode_event(name: str, identifier: str, data: bytes, *, retry: bool = False) -> bytes:
    """Encode an event; `data` is JSON, which has no line breaks.

    `retry` adds the reconnection delay. It is part of an event because some clients read the delay alone
    as an event without data.
    """
    hint = b"retry: %d\n" % RETRY_MILLISECONDS if retry else b""
    return b"%bevent: %b\nid: %b\ndata: %b\n\n" % (
        hint, name.encode(), identifier.encode(), data,
    )  # fmt: skip


class CutOffError(Exception):
    """Raised by frames on an error that has no frame: the connection is closed without the body's end,
    so that the client detects the truncation.
    """


class EventStreamResponse(Response):
    """Sends frames of JSON until they end or the client disconnects.

    Each line is one for every reader. A slow client slows `frames` down: nothing is queued here. `on_disconnect` runs if the client
    disconnects before the end.
    """

    _has_json = True

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        on_disconnect: Callable[[], Awaitable[object]] | None = None,
        media_type: str = f"{MEDIA_TYPE}; charset=utf-8",
    ) -> None:
        super().__init__(None, 200, _HEADERS | (headers or {}), media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(scope, receive, send))
        disconnecting = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait({sending, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            elif self._on_disconnect is not None:
                await self._on_disconnect()
        finally:
            await cancel_all([disconnecting, sending])
            await self._frames.aclose()

    async def _send_all(
        self, _scope: Scope, _receive: Receive, send: Send, first: bytes = b""
    ) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for frame in self._frames:
                if self._has_json:
                    frame = on_one_line(frame)
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except CutOffError:
            return  # the server closes a connection whose body has no end
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
