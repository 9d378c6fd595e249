"""One result with all its details; an attribution with its documents."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID, uuid4

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import Api, api_of, segment
from app.ui.bounded import MAX_BYTES, get_bounded, proxy
from app.ui.charts import stacked_bar
from app.ui.errors import RefusedError
from app.ui.pages import history_attribution
from app.ui.pages.history_attribution import (
    attribution_view,
    attributions_of,
    context_of,
)
from app.ui.remedies import explain
from app.ui.render import fragment, page, refreshed, to_time
from app.ui.results import MAX_SHOWN_CHARACTERS, OPTIONAL, timings, to_json, to_view, view_of
from app.ui.sending import key_of, read_form, texts_of

_MAX_TURNS = 200
_MAX_ATTEMPTS = 50
_MAX_VALUE = 2_000  # characters of a parameter


async def show(request: Request) -> Response:
    return await _page(request)


async def show_part(request: Request) -> Response:
    result_id = _id_of(request)
    if "x-part" not in request.headers:
        return RedirectResponse(f"/history/{result_id}", 303)
    api = api_of(request)
    result = await get_bounded(api, f"/results/{result_id}")
    if result is None:
        return fragment(request, "_large.html", result_id=result_id, most=MAX_BYTES)
    if result["kind"] == "attribution":
        template, context = "_attribution.html", await _attribution(request, api, result)
    else:
        template, context = "_details.html", await _details(api, result)
    return refreshed(request, template, is_ended=result["state"] != "pending", **context)


async def show_text(request: Request) -> Response:
    result_id = _id_of(request)
    result = await api_of(request).get(f"/results/{result_id}")
    text = result["result"] if isinstance(result["result"], str) else ""
    return _file(text, f"{result_id}.txt")


async def show_prompt(request: Request) -> Response:
    api, result_id = api_of(request), _id_of(request)
    result = await api.get(f"/results/{result_id}")
    context = await api.get_context(result)
    if context["messages"]:
        return _file(to_json(context["messages"]), f"{result_id}-prompt.json")
    return _file(context["content"] or "", f"{result_id}-prompt.txt")


async def show_json(request: Request) -> Response:
    result_id = _id_of(request)
    return await proxy(api_of(request), f"/results/{result_id}", f"{result_id}.json")


async def retry(request: Request) -> Response:
    form = await read_form(request)
    key = key_of(str(form.get("key", "")), {"retry_of": _id_of(request)})
    path = f"/results/{_id_of(request)}/retry"
    try:
        response = await api_of(request).send("POST", path, headers={"Idempotency-Key": key})
    except RefusedError as error:
        return await _page(request, error)
    return RedirectResponse(f"/history/{segment(response.json()['id'])}", 303)


async def delete(request: Request) -> Response:
    try:
        await api_of(request).delete(f"/results/{_id_of(request)}")
    except RefusedError as error:
        return await _page(request, error)
    return RedirectResponse("/history?deleted=1", 303)


async def attribute(request: Request) -> Response:
    """Request the result's attribution by an index: a result of its own, whose page comes next."""
    texts = texts_of(await read_form(request))
    path = f"/results/{_id_of(request)}/attribution"
    try:
        parameters = history_attribution.read_parameters(texts)
        answer = await api_of(request).post(path, parameters, {"index": texts.get("index")})
    except RefusedError as error:
        return await _page(request, error, texts)
    return RedirectResponse(f"/history/{segment(answer['id'])}", 303)


async def _page(
    request: Request, error: RefusedError | None = None, texts: Mapping[str, str] | None = None
) -> Response:
    api, result_id = api_of(request), _id_of(request)
    result = await get_bounded(api, f"/results/{result_id}")
    if result is None:
        return await page(request, "history_large.html", error, result_id=result_id, most=MAX_BYTES)
    context = await context_of(api, result)
    common = {
        "prompt": _prompt(context),
        "parameters": _table(result["parameters"]),
        "metadata": to_json(result["metadata"]) if result["metadata"] else "",
    }
    if result["kind"] == "attribution":
        return await page(
            request,
            "history_attribution.html",
            error,
            key=uuid4().hex,
            **await _attribution(request, api, result, context),
            **common,
        )
    return await page(
        request,
        "history_result.html",
        error,
        attributions=await attributions_of(api, result),
        form={"index": "", **dict.fromkeys(history_attribution.PARAMETERS, ""), **(texts or {})},
        **{**await _details(api, result), "result": await to_view(result, view_of(context))},
        **common,
    )


async def _attribution(
    request: Request,
    api: Api,
    result: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    # Templates show it as a result without an answer: it generates no tokens.
    shown = await to_view({**result, "result": None, "usage": None, "finish_reason": None})
    return {"result": shown, "found": await attribution_view(request, api, result, context)}


def _prompt(context: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt, of a long one the beginning; of a long chat its last messages."""
    text = context["content"] or ""
    messages = context["messages"] or ()
    left, turns = MAX_SHOWN_CHARACTERS, []
    for message in reversed(messages[-_MAX_TURNS:]):
        content = message["content"] if isinstance(message["content"], str) else ""
        turns.append({"role": message["role"], "content": content[:left]})
        left -= len(content)
        if left <= 0:
            break
    return {
        "turns": turns[::-1],
        "hidden": len(messages) - len(turns),
        "is_cut": left < 0 or len(text) > MAX_SHOWN_CHARACTERS,
        "text": None if messages else text[:MAX_SHOWN_CHARACTERS],
        "length": len(text),
    }


async def _details(api: Api, result: Mapping[str, Any]) -> dict[str, Any]:
    result_id = segment(result["id"])
    attempts, deliveries = await asyncio.gather(
        api.get(f"/results/{result_id}/attempts"),
        api.get("/webhooks/deliveries", {"result_id": result["id"], "limit": 1}),
    )
    return {
        "result": {**OPTIONAL, **result},
        "bar": _bar(result),
        "attempts": [_attempt(one) for one in attempts[-_MAX_ATTEMPTS:]],
        "delivery": deliveries[0] if deliveries else None,
        "key": uuid4().hex,
    }


def _bar(result: Mapping[str, Any]) -> Any:
    """The time by phase, as a bar; None while the result is pending."""
    times = timings(result)
    if times["total"] is None:
        return None
    queued = times["queued"] if times["queued"] is not None else times["total"]
    if times["prefill"] is not None and times["decode"] is not None:
        parts = [("Queued", queued), ("Prefill", times["prefill"]), ("Decode", times["decode"])]
    else:
        parts = [("Queued", queued), ("Running", max(0.0, times["total"] - queued))]
    if times["total"] >= 1:
        return stacked_bar("Time", parts, "s")
    return stacked_bar("Time", [(name, 1000 * value) for name, value in parts], "ms")


def _attempt(attempt: Mapping[str, Any]) -> dict[str, Any]:
    error = attempt["error"]
    words = explain(error["code"], error["message"])[0] if error else None
    seconds = None
    if attempt["started_at"] and attempt["ended_at"]:
        took = to_time(attempt["ended_at"]) - to_time(attempt["started_at"])
        seconds = max(0.0, took.total_seconds())  # two machines' clocks may differ
    return {**attempt, "words": words, "seconds": seconds}


def _table(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        rows.append((name, text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + " …"))
    return rows


def _file(text: str, name: str) -> Response:
    # A lone surrogate is not UTF-8; the API accepts none, but its output is not trusted here.
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    body = text.encode("utf-8", "replace")
    return Response(body, media_type="text/plain; charset=utf-8", headers=headers)


def _id_of(request: Request) -> str:
    try:
        return str(UUID(request.path_params["result_id"]))
    except ValueError:
        raise HTTPException(404) from None


routes = [
    Route("/history/{result_id}", show),
    Route("/history/{result_id}/part", show_part),
    Route("/history/{result_id}/text", show_text),
    Route("/history/{result_id}/prompt", show_prompt),
    Route("/history/{result_id}/json", show_json),
    Route("/history/{result_id}/retry", retry, methods=["POST"]),
    Route("/history/{result_id}/delete", delete, methods=["POST"]),
    Route("/history/{result_id}/attribution", attribute, methods=["POST"]),
]
