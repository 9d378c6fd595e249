"""Responses of the API that are proxied as streams, and end with their reader."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing

import httpx
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class ProxiedResponse(StreamingResponse):
    """Sends the parts of `body`, and closes `held` at every end.

    A generator that has not begun does not run its `finally`: a browser that leaves before the first
    byte would leave the connection to the API, and the API's work for it, open indefinitely.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        held: AsyncExitStack | None = None,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        super().__init__(body, headers=headers, media_type=media_type)
        self._body = body
        self._held = held or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held, aclosing(self._body):
            await super().__call__(scope, receive, send)


async def open_stream(
    stream: AbstractAsyncContextManager[httpx.Response],
) -> tuple[httpx.Response, AsyncExitStack]:
    """A response that stays open until the stack is closed. Raises ApiError."""
    async with AsyncExitStack() as stack:
        response = await stack.enter_async_context(stream)
        return response, stack.pop_all()


async def parts_of(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The body as a stream. If the API breaks off, so does this: the browser notices it."""
    async for part in response.aiter_bytes():
        yield part
