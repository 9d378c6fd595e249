"""One result on any page: its events, its answer once it has ended, and stopping it."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import httpx
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import api_of, identifier, segment
from app.ui.bounded import MAX_BYTES, get_bounded
from app.ui.errors import ApiError
from app.ui.proxied_response import ProxiedResponse
from app.ui.render import fragment
from app.ui.results import state_of, to_view
from app.ui.sending import read_form
from app.ui.session import safe_path

# The API sends a comment when nothing else comes: silence means a lost connection.
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)


async def events(request: Request) -> Response:
    """The result's events, proxied as the API sends them, with the visitor's token."""
    headers = {
        name: value
        for name in ("last-event-id",)
        if (value := request.headers.get(name)) is not None
    }
    params = {"after": request.query_params.get("after")}
    stack = AsyncExitStack()
    try:
        path = f"/results/{identifier(request.path_params['result_id'])}/stream"
        response = await stack.enter_async_context(
            api_of(request).stream("GET", path, params=params, headers=headers, timeout=_TIMEOUT)
        )
    except ApiError as error:
        await stack.aclose()
        return Response(error.message, error.status, media_type="text/plain")
    if response.status_code != 200:  # 204: the browser has seen the end
        await stack.aclose()
        return Response(status_code=response.status_code)

    async def body() -> AsyncGenerator[bytes, None]:
        try:
            async for part in response.aiter_raw():
                yield part
        except httpx.HTTPError:
            return  # the browser reconnects, with the id of the last event

    return ProxiedResponse(body(), stack, media_type="text/event-stream")


async def answer(request: Request) -> Response:
    result_id = identifier(request.path_params["result_id"])
    if "x-part" not in request.headers:
        return RedirectResponse(f"/history/{result_id}", 303)
    api = api_of(request)
    result = await get_bounded(api, f"/results/{result_id}")
    if result is None:  # only an ended result is so large
        response = fragment(request, "_large.html", result_id=result_id, most=MAX_BYTES)
        response.headers["X-State"] = "ended"
        return response
    view = request.query_params.get("view") or await view_of(request, result["context_id"])
    response = fragment(request, "_answer.html", result=await to_view(result, view))
    response.headers["X-State"] = state_of(result)
    return response


async def view_of(request: Request, context_id: str) -> str:
    """The initial view of an answer: formatted for a chat, plain for a text."""
    try:
        context = await api_of(request).get(f"/contexts/{segment(context_id)}")
    except ApiError:
        return "plain"
    return "rendered" if context["messages"] else "plain"


async def cancel(request: Request) -> Response:
    form = await read_form(request)
    result_id = identifier(request.path_params["result_id"])
    await api_of(request).post(f"/results/{result_id}/cancel")
    return RedirectResponse(safe_path(str(form.get("back") or f"/history/{result_id}")), 303)


routes = [
    Route("/results/{result_id}/events", events),
    Route("/results/{result_id}/answer", answer),
    Route("/results/{result_id}/cancel", cancel, methods=["POST"]),
]
