"""/results/: read, wait for, list, cancel and delete results."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.datastructures import QueryParams

from app.api.container import Services
from app.api.dependencies import Force, Name, ServicesOf, TeamOf, services_of, team_of, to_id
from app.api.disconnects import wait_for_end
from app.api.json_codec import json_response
from app.api.native.schemas import AttemptRead, ResultRead, result_wire
from app.api.pagination import After, Limit, page_response
from app.api.raw_routes import describe
from app.core.errors import FieldError, InvalidRequestError, invalid_field
from app.core.fair_share import in_turns
from app.results.pages import ResultFilter
from app.results.rows import ResultRow
from app.results.serialization import attempts_to_wire

router = APIRouter(tags=["results"])
raw = APIRouter(tags=["results"])

_CANCEL_WAIT_SECONDS = 2.0
_MAX_IDS = 100  # of a list's filter
_ID_CHARACTERS = 38  # with a comma and a space
_MAX_PAIRS = 16  # of metadata, of a list's filter

_WAIT_QUERY = {
    "wait": {
        "schema": {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
        "description": "Wait up to this many seconds until the result is terminal.",
    },
    "partial": {
        "schema": {"type": "boolean", "default": False},
        "description": "While pending, `result` is the text stored so far.",
    },
}
_MATCH_HEADER = {
    "If-None-Match": {
        "schema": {"type": "string"},
        "description": "The `ETag` of an earlier response; 304 while the result is unchanged.",
    }
}


@raw.get(
    "/results/{result_id}",
    responses={200: {"model": ResultRead}, 304: {"description": "The result is unchanged."}},
    openapi_extra=describe(
        path={"result_id": "The result's id."}, query=_WAIT_QUERY, header=_MATCH_HEADER
    ),
)
async def read_result(request: Request) -> Response:
    """Read a result; with `wait`, when it is terminal or the time is over."""
    services, team = services_of(request), team_of(request)
    result_id = to_id(request.path_params["result_id"], "result")
    if not request.scope["query_string"]:
        row = await services.results.get(team, result_id)
        return await _result_response(request, services, row)
    query = request.query_params
    seconds = _to_seconds(query.get("wait", "0"), services.settings.max_wait_seconds)
    if seconds > 0:
        row, _ = await wait_for_end(request, result_id, seconds)
    else:
        row = await services.results.get(team, result_id)
    if query.get("partial", "").lower() in ("true", "1") and row.state == "pending":
        partial = await services.results.partial_output(team, result_id)
        wire, headers = await _pending_wire(services, row)
        return json_response(wire | {"result": partial}, 200, headers)
    return await _result_response(request, services, row)


# Pairs of the metadata, in the part of the OpenAPI document of each route with these filters.
BY_METADATA: dict[str, Any] = {
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "required": False,
            "style": "deepObject",
            "explode": True,
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
            "description": "`metadata[KEY]=VALUE`: results with this pair in their metadata, whose "
            "value is a text, a number or a boolean in the form of its JSON; several pairs, at most "
            f"{_MAX_PAIRS}: with all of them.",
        }
    ]
}


async def _narrowed(
    request: Request,
    state: Literal["pending", "completed", "failed"] | None = None,
    model_name: Name = None,
    context_id: UUID | None = None,
    error_code: Name = None,
    retryable: bool | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    ids: Annotated[
        str | None,
        Query(
            max_length=_MAX_IDS * _ID_CHARACTERS,
            description=f"Ids of results, separated by commas; at most {_MAX_IDS}. Those of other "
            "teams and unknown ones are not on the page.",
        ),
    ] = None,
    q: Annotated[
        str | None,
        Query(
            max_length=500,
            pattern=r"^[^\x00]*$",
            description='Words of the prompt, the text or the error, all of them; `"a phrase"`, '
            "`or`, and `-not`.",
        ),
    ] = None,
) -> ResultFilter:
    return ResultFilter(
        state=state, model_name=model_name, context_id=context_id, error_code=error_code,
        retryable=retryable, created_after=created_after, created_before=created_before,
        ids=None if ids is None else _to_ids(ids), metadata=_to_pairs(request.query_params), words=q,
    )  # fmt: skip


def _to_ids(text: str) -> list[UUID]:
    parts = text.split(",")
    if len(parts) > _MAX_IDS:
        raise invalid_field("query.ids", f"has more than {_MAX_IDS} ids")
    try:
        return [UUID(part.strip()) for part in parts]
    except ValueError:
        message = "must be ids of results, separated by commas"
        raise invalid_field("query.ids", message) from None


def _to_pairs(query: QueryParams) -> dict[str, str]:
    """The pairs of `metadata[KEY]=VALUE`. Raises InvalidRequestError."""
    pairs: dict[str, str] = {}
    for name, value in query.multi_items():
        if name != "metadata" and not name.startswith("metadata["):
            continue
        key = name.removeprefix("metadata[").removesuffix("]")
        if name != f"metadata[{key}]" or not key:
            raise invalid_field("query.metadata", "must have the form metadata[KEY]=VALUE")
        if "\0" in key + value:
            raise invalid_field("query.metadata", "has a character that no metadata has")
        if key in pairs:
            raise invalid_field("query.metadata", "has a key twice")
        pairs[key] = value
    if len(pairs) > _MAX_PAIRS:
        raise invalid_field("query.metadata", f"has more than {_MAX_PAIRS} pairs")
    return pairs


# The filters that lists and exports have in common; their routes add `BY_METADATA`.
Narrowed = Annotated[ResultFilter, Depends(_narrowed)]


@router.get("/results/", response_model=list[ResultRead], openapi_extra=BY_METADATA)
async def list_results(
    request: Request,
    services: ServicesOf,
    team: TeamOf,
    narrowed: Narrowed,
    full: Annotated[bool, Query(description="Return long texts whole.")] = False,
    prompts: Annotated[bool, Query(description="Return the beginnings of the prompts.")] = False,
    limit: Limit = 50,
    after: After = None,
) -> Response:
    """List results, newest first; `full` adds logprobs and the texts beyond 1,000 characters.

    A result whose text is cut has `truncated`: true. A page ends by its bytes, too: `Link` has the next.
    """
    page = await services.results.list(
        team, narrowed, after=after, limit=limit, full=full, prompts=prompts
    )
    items = [result_wire(services, one.row) async for one in in_turns(page.rows)]
    for item, one in zip(items, page.rows, strict=True):
        if one.truncated:
            item["truncated"] = True
    if prompts:
        for item, one in zip(items, page.rows, strict=True):
            item["prompt_start"] = one.prompt_start
    return await page_response(request, items, page.following)


@router.get("/results/{result_id}/attempts", response_model=list[AttemptRead])
async def list_attempts(result_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """List the attempts of a result: time, worker and outcome."""
    row = await services.results.attempts(team, to_id(result_id, "result"))
    return json_response(attempts_to_wire(row))


@router.post("/results/cancel")
async def cancel_results(
    services: ServicesOf, team: TeamOf, context_id: UUID | None = None, model_name: Name = None
) -> dict[str, int]:
    """Cancel all pending results of a context, a model, or both; returns their number."""
    filters = {"context_id": context_id, "model_name": model_name}
    given = {name: value for name, value in filters.items() if value is not None}
    if not given:
        message = "name a context_id, a model_name, or both"
        raise InvalidRequestError(f"{message.capitalize()}.", [FieldError("query", message)])
    return {"cancelled": await services.queue.cancel(team, **given)}


@router.post(
    "/results/{result_id}/cancel", response_model=ResultRead, responses={202: {"model": ResultRead}}
)
async def cancel_result(result_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Cancel a result; idempotent. 200 once it is terminal, 202 while its worker is stopping."""
    identifier = to_id(result_id, "result")
    await services.queue.cancel(team, id=identifier)
    seconds = 0.0 if services.hub.is_full_for(team) else _CANCEL_WAIT_SECONDS
    row = await services.hub.wait_terminal(team, identifier, seconds)
    return json_response(result_wire(services, row), 202 if row.state == "pending" else 200)


@router.delete("/results/{result_id}", status_code=204)
async def delete_result(
    result_id: str, services: ServicesOf, team: TeamOf, force: Force = False
) -> Response:
    """Delete a result; 409 while it is pending, unless `force`."""
    await services.results.delete(team, to_id(result_id, "result"), force=force)
    return Response(status_code=204)


async def _result_response(request: Request, services: Services, row: ResultRow) -> Response:
    """A result, with estimates while it is pending; 304 if the client has it."""
    tag = _etag(services, row)
    is_known = any(
        name == b"if-none-match" and tag in value for name, value in request.scope["headers"]
    )
    wire, headers = None, {"ETag": tag.decode()}
    if row.state == "pending":
        wire, retry = await _pending_wire(services, row)
        headers |= retry
    if is_known:
        return Response(None, 304, headers)
    return json_response(wire or result_wire(services, row), 200, headers)


async def _pending_wire(
    services: Services, row: ResultRow
) -> tuple[dict[str, Any], dict[str, str]]:
    estimate = await services.positions.estimate(
        row.id, row.model_name, is_running=row.started_at is not None
    )
    wire = result_wire(services, row)
    wire["queue_position"] = estimate.position
    wire["estimated_wait_seconds"] = estimate.wait_seconds
    return wire, {"Retry-After": str(estimate.poll_seconds)}


def _etag(services: Services, row: ResultRow) -> bytes:
    """A weak validator (RFC 9110, 8.8.3): the row's state and its model's, not the estimates."""
    changed = row.finished_at or row.cancel_requested_at or row.started_at
    at = 0 if changed is None else int(changed.timestamp() * 1e6)
    ready = "" if row.state != "pending" else f"-{services.registry.is_ready(row.model_name):d}"
    return f'W/"{row.state}-{row.attempt}-{at:x}{ready}"'.encode()


def _to_seconds(text: str, most: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise invalid_field("wait", f"must be a number of seconds from 0 to {most:.0f}")
    return seconds
