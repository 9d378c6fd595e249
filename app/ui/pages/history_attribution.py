"""Attributions on the page of a result: its indexes, its attributions, and the documents of one."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from app.ui.api import Api, segment
from app.ui.attributions import to_attribution
from app.ui.bounded import get_bounded
from app.ui.errors import FormError, Ignoring
from app.ui.results import state_of

_MAX_INDEXES = 20
_PAGE_SIZE = 100
# Parameters of an attribution, by the names of the form's controls.
PARAMETERS: Mapping[str, type[int] | type[float]] = {
    "maximumFrequency": int,
    "minimumSpanLength": int,
    "maximumSpanDensity": float,
    "maximumDocumentsPerSpan": int,
}


async def attributions_of(api: Api, result: Mapping[str, Any]) -> dict[str, Any]:
    indexes = await api.get_cached("/indexes")
    found: list[dict[str, Any]] = []
    if result["state"] != "pending":
        # An attribution has its source's context. Lists omit its answer, which may be large.
        common = {"context_id": result["context_id"], "limit": _PAGE_SIZE}
        asked = [{**common, "model_name": f"infini-gram/{name}"} for name in indexes[:_MAX_INDEXES]]
        lists = await asyncio.gather(*(api.get("/results/", params) for params in asked))
        found = [
            {**one, "index": name, "state": state_of(one)}
            for name, answers in zip(indexes, lists, strict=False)
            for one in answers
            if one.get("source_id") == result["id"]
        ]
    return {"indexes": indexes, "found": found, "following": result.get("attribution")}


async def attribution_view(
    request: Request,
    api: Api,
    result: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The documents of an ended attribution; `?span=` selects the span, counted from 1."""
    if not isinstance(result["result"], dict):
        return None
    text = await _attributed_text(api, result, context)
    asked = request.query_params.get("span", "")
    chosen = int(asked) - 1 if asked.isdecimal() and len(asked) < 9 else None
    return await asyncio.to_thread(to_attribution, result["result"], text, chosen)


async def _attributed_text(
    api: Api, result: Mapping[str, Any], context: Mapping[str, Any] | None
) -> str | None:
    if result.get("source_id"):
        source = None
        with Ignoring(404):
            source = await get_bounded(api, f"/results/{segment(result['source_id'])}")
        return source["result"] if source and isinstance(source["result"], str) else None
    text = (context or await context_of(api, result))["content"]
    return text if isinstance(text, str) else None


def read_parameters(texts: Mapping[str, str]) -> dict[str, int | float]:
    parameters: dict[str, int | float] = {}
    wrong = []
    for name, kind in PARAMETERS.items():
        if text := texts.get(name, "").strip():
            try:
                parameters[name] = kind(text)
            except ValueError:
                words = "a whole number" if kind is int else "a number"
                wrong.append((name, f"must be {words}"))
    if wrong:
        raise FormError(wrong)
    return parameters


async def context_of(api: Api, result: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt; an empty one if it was deleted just now."""
    with Ignoring(404):
        return await api.get_context(result)
    return {"content": None, "messages": None}
