"""Responses of the API that may be large: read up to a bound, or proxied as a stream."""

import asyncio
import json
from typing import Any

from app.ui.api import Api
from app.ui.errors import RefusedError
from app.ui.proxied_response import ProxiedResponse, open_stream, parts_of
from app.ui.render import size

# JSON takes about ten times its size in memory as objects, for a moment.
MAX_BYTES = 16_000_000
_MIN_THREADED_BYTES = 200_000  # JSON of this size and above is not parsed on the event loop


async def get_bounded(api: Api, path: str) -> Any:
    """`Api.get`; None for a response larger than MAX_BYTES."""
    async with api.stream("GET", path) as response:
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_BYTES:
                return None
    if len(body) < _MIN_THREADED_BYTES:
        return json.loads(body)
    return await asyncio.to_thread(json.loads, body)


async def get_result(api: Api, result_id: str) -> Any:
    """A result that a page needs whole. Raises ApiError, also if it is larger than MAX_BYTES."""
    result = await get_bounded(api, f"/results/{result_id}")
    if result is None:
        raise LargeResultError(result_id)
    return result


class LargeResultError(RefusedError):
    """The result `result_id` is too large to be read whole."""

    def __init__(self, result_id: str) -> None:
        message = (
            f"Result {result_id} is larger than {size(MAX_BYTES)}: too large for this page. Its own "
            "page, in the history, has it as a file."
        )
        super().__init__(413, "too_large", message)
        self.result_id = result_id


async def proxy(api: Api, path: str, file_name: str) -> ProxiedResponse:
    response, stack = await open_stream(api.stream("GET", path))
    headers = {"Content-Disposition": f'attachment; filename="{file_name}"'}
    return ProxiedResponse(parts_of(response), stack, headers, "application/json")
