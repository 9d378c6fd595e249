"""The history: all stored results, by words and filters, page by page."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import STREAM_TIMEOUT, api_of
from app.ui.errors import ApiError, FormError, RefusedError
from app.ui.history_filters import (
    address,
    newer,
    older,
    read_filters,
    to_chips,
    to_form,
    to_params,
)
from app.ui.proxied_response import ProxiedResponse, open_stream, parts_of
from app.ui.remedies import REMEDIES
from app.ui.render import page
from app.ui.results import one_line, outcome, state_of, timings
from app.ui.sending import read_form

_PAGE_SIZE = 50
_MAX_MODELS = 500
_CANCELLABLE = ("model_name", "context_id")


async def show(request: Request) -> Response:
    return await _page(request, read_filters(request.query_params))


async def export(request: Request) -> Response:
    """All results of the filters as JSON lines, proxied as a stream."""
    filters = read_filters(request.query_params)
    try:
        params = to_params(filters)
    except FormError as error:
        return await _page(request, filters, error)
    response, stack = await open_stream(
        api_of(request).stream("GET", "/results/export", params=params, timeout=STREAM_TIMEOUT)
    )
    headers = {"Content-Disposition": response.headers["content-disposition"]}
    return ProxiedResponse(parts_of(response), stack, headers, "application/x-ndjson")


async def cancel(request: Request) -> Response:
    form = await read_form(request)
    filters = read_filters({name: str(value) for name, value in form.items()})
    params = {name: filters.get(name) for name in _CANCELLABLE}
    try:
        answer = await api_of(request).post("/results/cancel", params=params)
    except RefusedError as error:
        return await _page(request, filters, error)
    return RedirectResponse(address(filters, cancelled=str(answer["cancelled"])), 303)


async def _page(
    request: Request,
    filters: Mapping[str, str],
    problem: RefusedError | None = None,
) -> Response:
    """The list; an error of a filter is shown above it, and all entries stay."""
    query = request.query_params
    after, trail = query.get("after", ""), query.get("trail", "")
    rows: list[dict[str, Any]] = []
    has_more = False
    if problem is None:
        try:
            params = {**to_params(filters), "after": after, "limit": _PAGE_SIZE, "prompts": True}
            response = await api_of(request).send("GET", "/results/", params=params)
            rows, has_more = response.json(), "next" in response.links
        except RefusedError as error:
            if error.code == "unreachable":  # the filters are in the address
                raise
            problem = error
    return await page(
        request,
        "history.html",
        problem,
        form=to_form(filters),
        chips=to_chips(filters),
        rows=[_row(one) for one in rows],
        is_first=not after,
        newer=newer(filters, trail) if after else None,
        older=older(filters, trail, after, rows[-1]["id"]) if has_more else None,
        export=address(filters, "/history/export"),
        models=await _model_names(request),
        error_codes=sorted({*REMEDIES, filters.get("error_code", "cancelled")}),
        notice=_notice(query),
    )


async def _model_names(request: Request) -> list[str]:
    try:
        api = api_of(request)
        models = [one["name"] for one in await api.get_cached("/models/")]
        indexes = [f"infini-gram/{name}" for name in await api.get_cached("/indexes")]
    except ApiError:
        return []
    return [*sorted(models), *indexes][:_MAX_MODELS]


def _notice(query: Mapping[str, str]) -> str | None:
    if query.get("deleted"):
        return "The result is deleted."
    count = query.get("cancelled", "")
    if not count.isdecimal() or len(count) > 9:
        return None
    return {"0": "Nothing was pending.", "1": "One result is stopped."}.get(
        count, f"{int(count):,} results are stopped."
    )


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    answer = outcome(result)
    usage = (result["usage"] or {}) if result["kind"] == "generation" else {}
    return {
        "id": result["id"],
        "created_at": result["created_at"],
        "state": state_of(result),
        "model": result["model_name"],
        "text": one_line(result.get("prompt_start")) or one_line(answer) or "(nothing to show)",
        "answer": answer,
        "tokens": usage.get("completion_tokens"),
        "seconds": timings(result)["total"],
    }


routes = [
    Route("/history", show),
    Route("/history/export", export),
    Route("/history/cancel", cancel, methods=["POST"]),
]
