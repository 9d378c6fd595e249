"""Compare: one prompt to up to four models or parameter sets, side by side and live."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import Api, api_of, identifier
from app.ui.bounded import get_result
from app.ui.errors import FormError, RefusedError
from app.ui.parameters import (
    Parameter,
    as_entered,
    flat,
    model_of,
    parse_parameters,
    read_parameters,
    to_form,
)
from app.ui.render import page
from app.ui.results import to_view, view_of
from app.ui.sending import key_of, read_form, texts_of

PLACES = (1, 2, 3, 4)
# The most compared parameters have their own controls; the rest is written as JSON.
_SHOWN = ("temperature", "top_p", "max_tokens", "seed")
# Whether equal results may answer; otherwise as set for the team.
_REUSE = {"true": True, "false": False}


async def show(request: Request) -> Response:
    """The form; with `?ids=`, those results as they come and the form that sent them."""
    api = api_of(request)
    ids = [one for one in request.query_params.get("ids", "").split(",") if one][: len(PLACES)]
    results = await asyncio.gather(*(get_result(api, identifier(one)) for one in ids))
    results = [one for one in results if one["kind"] == "generation"]
    form: dict[str, str] = {}
    view = "plain"
    if results:
        context = await api.get_context(results[0])
        parameters, models = await asyncio.gather(read_parameters(api), api.get("/models/"))
        entered = [as_entered(one, flat(parameters), models) for one in results]
        form = _form_of(results, context, entered)
        form["reuse"] = request.query_params.get("reuse", "")
        view = view_of(context)
    views = await asyncio.gather(*(to_view(one, view) for one in results))
    return await _page(request, form, results=views)


async def send(request: Request) -> Response:
    """Send the prompt to each place that has a model: in one commit, all or none."""
    api = api_of(request)
    texts = texts_of(await read_form(request))
    try:
        bodies = await _bodies(api, texts)
        response = await api.send("POST", "/results/", json=list(bodies.values()))
        ids = await _all_or_none(api, bodies, response.json())
    except RefusedError as error:
        return await _page(request, texts, error)
    kept = f"&reuse={texts['reuse']}" if texts.get("reuse") in _REUSE else ""
    return RedirectResponse(f"/compare?ids={','.join(ids)}{kept}", 303)


async def _all_or_none(
    api: Api, bodies: Mapping[int, Mapping[str, Any]], answers: Iterable[Mapping[str, Any]]
) -> list[str]:
    """The ids of the results. Raises FormError if one was refused, after stopping the others."""
    outcomes = list(zip(bodies.items(), answers, strict=True))
    wrong = [
        (f"Answer {place} ({body['model']}){name}", message)
        for (place, body), answer in outcomes
        if "id" not in answer
        for name, message in _refusals(answer)
    ]
    ids = [str(answer["id"]) for _, answer in outcomes if "id" in answer]
    if wrong:
        for one in ids:
            await api.post(f"/results/{identifier(one)}/cancel")
        raise FormError(wrong)
    return ids


def _refusals(problem: Mapping[str, Any]) -> list[tuple[str, str]]:
    errors = problem.get("errors") or ()
    return [(f", {one['field']}", one["message"]) for one in errors] or [("", problem["detail"])]


async def _page(
    request: Request,
    form: Mapping[str, str],
    error: RefusedError | None = None,
    results: Sequence[Mapping[str, Any]] = (),
) -> Response:
    api = api_of(request)
    models = await api.get_models()
    parameters = {one.name: one for one in flat(await read_parameters(api))}
    form = {**form, "key": uuid4().hex}
    if models and "1.model" not in form:
        # Two places to begin with: the first two models, or the same one twice.
        form |= {"1.model": models[0]["name"], "2.model": models[min(1, len(models) - 1)]["name"]}
        form["mode"] = "chat" if models[0]["chat"] else "text"
    return await page(
        request,
        "compare.html",
        error,
        form=form,
        models=models,
        places=PLACES,
        parameters=[parameters[name] for name in _SHOWN if name in parameters],
        results=results,
    )


async def _bodies(api: Api, texts: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    """By place, the items of the list for POST /results/. Raises FormError."""
    prompt = texts.get("prompt", "")
    if not prompt:
        raise FormError([("prompt", "enter what the models are to answer or continue")])
    shown = [one for one in flat(await read_parameters(api)) if one.name in _SHOWN]
    is_chat = texts.get("mode") == "chat"
    source = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"content": prompt}
    bodies: dict[int, dict[str, Any]] = {}
    wrong: list[tuple[str, str]] = []
    for place in PLACES:
        if not texts.get(f"{place}.model"):
            continue
        try:
            parameters = _parameters(texts, place, shown)
        except FormError as error:
            named = f"Answer {place} ({texts[f'{place}.model']})"
            wrong += [(f"{named}, {name}", message) for name, message in error.fields]
            continue
        body: dict[str, Any] = {"model": texts[f"{place}.model"], **source}
        if parameters:
            body["parameters"] = parameters
        if (reuse := _REUSE.get(texts.get("reuse", ""))) is not None:
            body["reuse"] = reuse
        # The place is part of the key: equal places are intended.
        body["idempotency_key"] = key_of(texts.get("key", ""), {"place": place, **body})
        bodies[place] = body
    if not bodies and not wrong:
        wrong = [("model", "choose at least one")]
    if wrong:
        raise FormError(wrong)
    return bodies


def _parameters(texts: Mapping[str, str], place: int, shown: Iterable[Parameter]) -> dict[str, Any]:
    values = parse_parameters(shown, texts, f"{place}.p.")
    if more := texts.get(f"{place}.more", "").strip():
        try:
            others = json.loads(more)
        except (ValueError, RecursionError):
            others = None
        if not isinstance(others, dict):
            raise FormError([("other parameters", 'must be JSON such as {"top_k": 20}')])
        values = others | values
    return values


def _form_of(
    results: list[dict[str, Any]], context: Mapping[str, Any], entered: list[dict[str, Any]]
) -> dict[str, str]:
    """The form that sent these results, with the parameters that were `entered`."""
    messages = context["messages"]
    form = {
        "mode": "chat" if messages else "text",
        "prompt": messages[-1]["content"] if messages else context["content"] or "",
    }
    for place, result, values in zip(PLACES, results, entered, strict=False):
        form[f"{place}.model"] = model_of(result)
        shown = {k: v for k, v in values.items() if k in _SHOWN}
        others = {k: v for k, v in values.items() if k not in _SHOWN}
        form |= to_form(shown, f"{place}.p.")
        if others:
            form[f"{place}.more"] = json.dumps(others)
    return form


routes = [
    Route("/compare", show),
    Route("/compare", send, methods=["POST"]),
]
