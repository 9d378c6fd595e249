"""/models/send and /results/: send prompts, read, wait for, cancel and delete results."""

import contextlib
import re
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import asyncpg
import orjson
from fastapi import APIRouter, Query
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from app.errors import (
    BodyTooLargeError,
    DatabaseUnavailableError,
    FieldError,
    InvalidRequestError,
    ServiceError,
    TooManyWaitersError,
)
from app.results import ResultFilter
from app.routes.common import (
    KEY_HEADER,
    TEAM,
    After,
    Force,
    Limit,
    Name,
    ServicesOf,
    body_of,
    describe,
    idempotency_key,
    page_response,
    reference,
    services_of,
    to_id,
)
from app.schemas.native import (
    MAX_BULK,
    AttemptRead,
    ResultCreate,
    ResultRead,
    SendOptions,
    accepted_to_wire,
    attempts_to_wire,
    result_to_wire,
)
from app.services import Services
from app.submission import Answer, Replayed, retry, submit, submit_all, submit_context
from app.wire import json_response, parse

router = APIRouter(tags=["results"])
raw = APIRouter(tags=["results"])

Options = TypeVar("Options", bound=SendOptions)

_SEND = TypeAdapter(SendOptions)
_CREATE = TypeAdapter(ResultCreate)
_NO_OPTIONS = SendOptions()
_PREFER_WAIT = re.compile(rb"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6})\"?", re.IGNORECASE)
_CANCEL_WAIT_SECONDS = 2.0

_WAIT_HEADER = {
    "Prefer": {
        "schema": {"type": "string", "pattern": r"wait=\d+", "example": "wait=30"},
        "description": "Hold up to this many seconds; answer 200 if the result is terminal by then.",
    }
}
_WAIT_QUERY = {
    "wait": {
        "schema": {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
        "description": "Hold up to this many seconds until the result is terminal.",
    },
    "partial": {
        "schema": {"type": "boolean", "default": False},
        "description": "While pending, `result` is the text stored so far.",
    },
}
_SEND_EXAMPLE = {"parameters": {"max_tokens": 40, "temperature": 0}, "deadline_seconds": 600}
_CREATE_EXAMPLE = {"model": "demo", "content": "def ", "parameters": {"max_tokens": 40}}


@raw.get(
    "/results/{result_id}",
    responses={200: {"model": ResultRead}},
    openapi_extra=describe(path={"result_id": "The result's id."}, query=_WAIT_QUERY),
)
async def read_result(request: Request) -> Response:
    """Read a result; with `wait`, once it is terminal or the time is over."""
    services = services_of(request)
    result_id = to_id(request.path_params["result_id"], "result")
    if not request.scope["query_string"]:
        return await _result_response(services, await services.results.get(TEAM, result_id))
    query = request.query_params
    seconds = _to_seconds(query.get("wait", "0"), services.settings.max_wait_seconds)
    row = await services.hub.wait_terminal(TEAM, result_id, seconds)
    if query.get("partial", "").lower() in ("true", "1") and row["state"] == "pending":
        partial = await services.results.partial_output(TEAM, result_id)
        return await _result_response(services, row, {"result": partial})
    return await _result_response(services, row)


@raw.post(
    "/models/send/{model_name}/{context_id}",
    status_code=202,
    responses={202: {"model": ResultRead}, 200: {"model": ResultRead}},
    openapi_extra=describe(
        path={"model_name": "A model's name.", "context_id": "A saved context's id."},
        header=_WAIT_HEADER | KEY_HEADER,
        body={"schema": reference(SendOptions), "example": _SEND_EXAMPLE},
    ),
)
async def send_context(request: Request) -> Response:
    """Send a saved prompt to a model. The answer holds the result's id, committed."""
    body = await body_of(request)
    options = _with_key(request, parse(_SEND, body) if body else _NO_OPTIONS)
    path = request.path_params
    services = services_of(request)
    answer = await submit_context(
        services, TEAM, path["model_name"], to_id(path["context_id"], "context"), options
    )
    return await _accepted_response(request, services, answer)


@raw.post(
    "/results/",
    status_code=202,
    responses={202: {"model": ResultRead | list[ResultRead]}, 200: {"model": ResultRead}},
    openapi_extra=describe(
        header=_WAIT_HEADER | KEY_HEADER,
        body={
            "schema": {
                "oneOf": [
                    reference(ResultCreate),
                    {"type": "array", "maxItems": MAX_BULK, "items": reference(ResultCreate)},
                ]
            },
            "example": _CREATE_EXAMPLE,
        },
    ),
)
async def create_results(request: Request) -> Response:
    """Save a prompt and send it in one call; a list of up to 1,000 is one commit.

    A list is answered by a list: each item a Result, or a problem in its place.
    """
    body = await body_of(request)
    services = services_of(request)
    if body.lstrip()[:1] == b"[":
        if idempotency_key(request) is not None:
            raise _one_key_for_many()
        answers = await submit_all(services, TEAM, _parse_list(body))
        return json_response([_bulk_item(services, answer) for answer in answers], 202)
    create = _with_key(request, parse(_CREATE, body))
    return await _accepted_response(request, services, await submit(services, TEAM, create))


@router.get("/results/", response_model=list[ResultRead])
async def list_results(
    request: Request,
    services: ServicesOf,
    state: Literal["pending", "completed", "failed"] | None = None,
    model_name: Name = None,
    context_id: UUID | None = None,
    error_code: Name = None,
    retryable: bool | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    full: Annotated[bool, Query(description="Do not cut long texts.")] = False,
    limit: Limit = 50,
    after: After = None,
) -> Response:
    """List results, newest first; long texts are cut at 1,000 characters unless `full`."""
    narrowed = ResultFilter(
        state, model_name, context_id, error_code, retryable, created_after, created_before
    )
    rows = await services.results.list(TEAM, narrowed, after=after, limit=limit, full=full)
    return page_response(request, [_to_wire(services, row) for row in rows], limit)


@router.get("/results/{result_id}/attempts", response_model=list[AttemptRead])
async def list_attempts(result_id: str, services: ServicesOf) -> Response:
    """The attempts of a result: when, where, and how each ended."""
    row = await services.results.attempts(TEAM, to_id(result_id, "result"))
    return json_response(attempts_to_wire(row))


@router.post("/results/cancel")
async def cancel_results(
    services: ServicesOf, context_id: UUID | None = None, model_name: Name = None
) -> dict[str, int]:
    """Cancel all pending results of a context, a model, or both; answers how many."""
    filters = {"context_id": context_id, "model_name": model_name}
    given = {name: value for name, value in filters.items() if value is not None}
    if not given:
        message = "name a context_id, a model_name, or both"
        raise InvalidRequestError(f"{message.capitalize()}.", [FieldError("query", message)])
    return {"cancelled": await services.queue.cancel(TEAM, **given)}


@router.post(
    "/results/{result_id}/cancel",
    response_model=ResultRead,
    responses={202: {"model": ResultRead}},
)
async def cancel_result(result_id: str, services: ServicesOf) -> Response:
    """Cancel a result; idempotent. 200 once it is terminal, 202 while its worker is stopping."""
    identifier = to_id(result_id, "result")
    await services.queue.cancel(TEAM, id=identifier)
    seconds = 0.0 if services.hub.is_full else _CANCEL_WAIT_SECONDS
    row = await services.hub.wait_terminal(TEAM, identifier, seconds)
    return json_response(_to_wire(services, row), 202 if row["state"] == "pending" else 200)


@router.post(
    "/results/{result_id}/retry",
    status_code=202,
    response_model=ResultRead,
    responses={200: {"model": ResultRead}},
    openapi_extra=describe(header=_WAIT_HEADER | KEY_HEADER),
)
async def retry_result(request: Request, result_id: str, services: ServicesOf) -> Response:
    """Send the request of an ended result once more: a new result, linked by `retry_of`.

    409 while the first one is pending.
    """
    key = idempotency_key(request)
    answer = await retry(services, TEAM, to_id(result_id, "result"), key)
    return await _accepted_response(request, services, answer)


@router.delete("/results/{result_id}", status_code=204)
async def delete_result(result_id: str, services: ServicesOf, force: Force = False) -> Response:
    """Delete a result; 409 while it is pending, unless `force`."""
    await services.results.delete(TEAM, to_id(result_id, "result"), force=force)
    return Response(status_code=204)


async def _accepted_response(request: Request, services: Services, answer: Answer) -> Response:
    """The result that a request made, or made before: 202 with its place, 200 once terminal."""
    wire = _answer_to_wire(services, answer)
    headers = {"Location": f"/results/{wire['id']}"}
    if isinstance(answer, Replayed):
        headers["Idempotent-Replayed"] = "true"
    prefer = next((value for name, value in request.scope["headers"] if name == b"prefer"), b"")
    wanted = _PREFER_WAIT.search(prefer)
    if wanted:
        seconds = min(float(wanted[1]), services.settings.max_wait_seconds)
        # The result is committed: an error of the waiting must not hide its id.
        with contextlib.suppress(TooManyWaitersError, DatabaseUnavailableError):
            row = await services.hub.wait_terminal(TEAM, UUID(wire["id"]), seconds)
            wire = _to_wire(services, row)
            headers["Preference-Applied"] = f"wait={seconds:.0f}"
    if wire["state"] != "pending":
        return json_response(wire, 200, headers)
    return json_response(wire, 202, headers | {"Retry-After": "1"})


def _with_key(request: Request, options: Options) -> Options:
    """The options with the key of the header."""
    key = idempotency_key(request, options.idempotency_key)
    if key == options.idempotency_key:
        return options
    return options.model_copy(update={"idempotency_key": key})


def _one_key_for_many() -> InvalidRequestError:
    message = "cannot name a whole list: give each item its own idempotency_key"
    return InvalidRequestError(
        f"Idempotency-Key: {message}.", [FieldError("Idempotency-Key", message)]
    )


def _parse_list(body: bytes) -> list[ResultCreate | ServiceError]:
    """Each item by itself: one wrong item does not refuse the others."""
    try:
        items = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error}.", [FieldError("body", str(error))]
        ) from error
    if not items:
        raise InvalidRequestError("The list is empty.", [FieldError("body", "is an empty list")])
    if len(items) > MAX_BULK:
        raise BodyTooLargeError(f"A list holds at most {MAX_BULK} items; this one {len(items)}.")
    return [_parse_item(orjson.dumps(item)) for item in items]


def _parse_item(body: bytes) -> ResultCreate | ServiceError:
    try:
        return parse(_CREATE, body)
    except InvalidRequestError as error:
        return error


def _bulk_item(services: Services, item: Answer | ServiceError) -> dict[str, Any]:
    return item.to_problem() if isinstance(item, ServiceError) else _answer_to_wire(services, item)


def _answer_to_wire(services: Services, answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Replayed):
        return _to_wire(services, answer.row)
    return accepted_to_wire(answer.result, model_ready=answer.model_ready)


def _to_wire(services: Services, row: asyncpg.Record) -> dict[str, Any]:
    return result_to_wire(row, model_ready=services.registry.is_ready(row["model_name"]))


async def _result_response(
    services: Services, row: asyncpg.Record, more: dict[str, Any] | None = None
) -> Response:
    """A result; while it is pending with its place in the queue and when to ask again."""
    wire = _to_wire(services, row)
    if row["state"] != "pending":
        return json_response(wire)
    estimate = await services.positions.estimate(row)
    wire["queue_position"] = estimate.position
    wire["estimated_wait_seconds"] = estimate.wait_seconds
    return json_response(wire | (more or {}), headers={"Retry-After": str(estimate.poll_seconds)})


def _to_seconds(text: str, most: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        message = f"must be a number of seconds from 0 to {most:.0f}"
        raise InvalidRequestError(f"wait: {message}.", [FieldError("wait", message)])
    return seconds
