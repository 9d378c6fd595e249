"""The playground: one prompt to one model, with every parameter, and the answer as a stream."""

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui import snippets
from app.ui.api import Api, api_of, identifier, segment
from app.ui.bounded import LargeResultError, get_result
from app.ui.errors import ApiError, FormError, RefusedError
from app.ui.parameters import (
    Parameter,
    as_entered,
    flat,
    model_of,
    parse_parameters,
    read_parameters,
    to_form,
    without_adapter,
)
from app.ui.render import page
from app.ui.results import to_view, view_of
from app.ui.sending import key_of, read_form, texts_of

_RECENT = 5


async def show(request: Request) -> Response:
    """The form, empty or with the request of `?from=`; and the pending results."""
    api = api_of(request)
    form = {"model": request.query_params.get("model", "")}
    if source := request.query_params.get("from"):
        result = await get_result(api, identifier(source))
        context = await api.get_context(result)
        form = _form_of(result, context, await _entered(api, result), is_next=False)
    return await _page(request, form)


async def show_result(request: Request) -> Response:
    api = api_of(request)
    try:
        result = await get_result(api, identifier(request.path_params["result_id"]))
    except LargeResultError as error:
        return RedirectResponse(f"/history/{error.result_id}", 303)
    if result["kind"] != "generation":
        return RedirectResponse(f"/history/{segment(result['id'])}", 303)
    context = await api.get_context(result)
    url = request.app.state.settings.shown_api_url
    needs_token = (await api.me()).is_authenticated
    source = "messages" if context["messages"] else "content"
    body = {"model": model_of(result), source: context[source]}
    body["parameters"] = without_adapter(result["parameters"])
    return await _page(
        request,
        _form_of(result, context, await _entered(api, result), is_next=True),
        result=await to_view(result, view_of(context)),
        turns=_parts(context)[1],
        snippets=snippets.of_request(url, body, needs_token=needs_token),
    )


async def send(request: Request) -> Response:
    """Send the form; the answer is at the result's own address."""
    api = api_of(request)
    texts = texts_of(await read_form(request))
    parameters = await read_parameters(api)
    try:
        body = await _body(api, texts, flat(parameters))
        headers = {"Idempotency-Key": key_of(texts.get("key", ""), body)}
        response = await api.send("POST", "/results/", json=body, headers=headers)
    except RefusedError as error:
        return await _page(request, texts, error, turns=await _turns_before(api, texts))
    return RedirectResponse(f"/playground/{response.json()['id']}", 303)


async def _turns_before(api: Api, texts: Mapping[str, str]) -> list[dict[str, str]]:
    try:
        return await _conversation(api, texts.get("after", ""))
    except ApiError:
        return []


async def _page(
    request: Request,
    form: Mapping[str, str],
    error: RefusedError | None = None,
    /,
    **context: Any,
) -> Response:
    api = api_of(request)
    models = await api.get_models()
    named = [one for one in models if one["name"] == form.get("model")]
    pending = await api.get("/results/", {"state": "pending", "limit": _RECENT})
    shown = {"result": None, "turns": [], "snippets": {}} | context
    return await page(
        request,
        "playground.html",
        error,
        form={**form, "key": uuid4().hex},
        models=models,
        chosen=next(iter(named or models), None),
        indexes=await api.get_cached("/indexes"),
        parameters=await read_parameters(api),
        pending=[
            one for one in pending if not shown["result"] or one["id"] != shown["result"]["id"]
        ],
        max_priority=(await api.me()).max_priority,
        **shown,
    )


async def _body(api: Api, texts: Mapping[str, str], parameters: list[Parameter]) -> dict[str, Any]:
    """The body of POST /results/. Raises FormError."""
    prompt = texts.get("prompt", "")
    if not prompt:
        raise FormError([("prompt", "enter what the model is to answer or continue")])
    body: dict[str, Any] = {"model": texts.get("model", "")}
    if texts.get("mode") == "chat":
        system = texts.get("system", "")
        head = [{"role": "system", "content": system}] if system.strip() else []
        earlier = await _conversation(api, texts.get("after", ""))
        body["messages"] = [*head, *earlier, {"role": "user", "content": prompt}]
    else:
        body["content"] = prompt
    values = parse_parameters(parameters, texts)
    if texts.get("after") and "messages" in body:
        await _reopen(api, texts["after"], values)
    if values:
        body["parameters"] = values
    return body | _options(texts)


async def _reopen(api: Api, after: str, values: dict[str, Any]) -> None:
    """Drop a `max_tokens` that only the page filled in: the rest of the budget of the answer before.

    While that one was pending, the length of its prompt was unknown.
    """
    before = await get_result(api, identifier(after))
    is_same = values.get("max_tokens") == before["parameters"].get("max_tokens")
    if is_same and "max_tokens" not in await _entered(api, before):
        values.pop("max_tokens", None)


async def _conversation(api: Api, after: str) -> list[dict[str, str]]:
    """The chat up to and with that result's answer, without its system message. Raises FormError."""
    if not after:
        return []
    result = await get_result(api, identifier(after))
    if result["state"] == "pending":
        raise FormError(
            [("prompt", "wait for the answer, or stop it: the next message follows it")]
        )
    _, messages = _parts(await api.get_context(result))
    answer = result["result"] if isinstance(result["result"], str) else ""
    return [*messages, {"role": "assistant", "content": answer}] if answer else messages


def _options(texts: Mapping[str, str]) -> dict[str, Any]:
    """Options of a request in addition to its parameters. Raises FormError."""
    options: dict[str, Any] = {}
    wrong = []
    for name, kind in (("priority", int), ("deadline_seconds", float)):
        if text := texts.get(name, "").strip():
            try:
                options[name] = kind(text)
                json.dumps(options[name], allow_nan=False)
            except ValueError:
                wrong.append((name, "must be a number"))
    if wrong:
        raise FormError(wrong)
    if texts.get("attribute"):
        options["attribute"] = texts["attribute"]
    return options


def _form_of(
    result: Mapping[str, Any],
    context: Mapping[str, Any],
    entered: Mapping[str, Any],
    *,
    is_next: bool,
) -> dict[str, str]:
    """The form that sent a result, with the parameters that were `entered`.

    `is_next`: for the next message of its chat.
    """
    form = {"model": model_of(result), **to_form(entered)}
    if not context["messages"]:
        return {**form, "mode": "text", "prompt": context["content"] or ""}
    system, messages = _parts(context)
    form |= {"mode": "chat", "system": system}
    if is_next:
        return {**form, "after": result["id"]}
    return {**form, "prompt": messages[-1]["content"] if messages else ""}


async def _entered(api: Api, result: Mapping[str, Any]) -> dict[str, Any]:
    parameters = flat(await read_parameters(api))
    return as_entered(result, parameters, await api.get("/models/"))


def _parts(context: Mapping[str, Any]) -> tuple[str, list[dict[str, str]]]:
    messages = list(context["messages"] or ())
    if messages and messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return "", messages


routes = [
    Route("/playground", show),
    Route("/playground", send, methods=["POST"]),
    Route("/playground/{result_id}", show_result),
]
