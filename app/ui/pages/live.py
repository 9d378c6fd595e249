"""One result on any page: its events, its answer once it has ended, and stopping it."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import STREAM_TIMEOUT, Api, api_of, identifier
from app.ui.bounded import MAX_BYTES, get_bounded
from app.ui.errors import ApiError
from app.ui.proxied_response import ProxiedResponse, open_stream
from app.ui.render import fragment
from app.ui.results import state_of, to_view, view_of
from app.ui.sending import read_form
from app.ui.session import safe_path


async def events(request: Request) -> Response:
    name = "last-event-id"
    headers = {name: request.headers[name]} if name in request.headers else {}
    params = {"after": request.query_params.get("after")}
    try:
        path = f"/results/{identifier(request.path_params['result_id'])}/stream"
        response, stack = await open_stream(
            api_of(request).stream(
                "GET", path, params=params, headers=headers, timeout=STREAM_TIMEOUT
            )
        )
    except ApiError as error:
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
    view = request.query_params.get("view") or await _initial_view(api, result)
    response = fragment(request, "_answer.html", result=await to_view(result, view))
    response.headers["X-State"] = state_of(result)
    return response


async def _initial_view(api: Api, result: Mapping[str, Any]) -> str:
    try:
        return view_of(await api.get_context(result))
    except ApiError:
        return "plain"


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
