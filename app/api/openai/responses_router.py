"""/v1/responses: OpenAI's responses: create, read, stream, cancel and delete."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from app.api.container import Services
from app.api.dependencies import ServicesOf, TeamOf, principal_of, services_of, team_of
from app.api.group_responses import erase_delivered, id_headers, respond_complete, with_headers
from app.api.idempotency_header import KEY_HEADER
from app.api.json_codec import json_response, parse
from app.api.openai.batches_schemas import DeletedRead, page_to_wire
from app.api.openai.response_events import ATTEMPT_STEP, ResponseEvents
from app.api.openai.responses_input import count_images, with_images
from app.api.openai.responses_output import (
    InputItemListRead,
    ResponseRead,
    bare_response,
    page_of,
    response_to_wire,
)
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.responses_serving import PreparedResponse, prepare_response, response_frames
from app.api.openai.stored_responses import (
    StoredRequest,
    from_response_id,
    stored_of,
    to_response_id,
)
from app.api.output_rules import counter_of
from app.api.raw_routes import body_of, describe
from app.api.sse import MEDIA_TYPE, EventStreamResponse
from app.core.byte_budget import release
from app.core.errors import FieldError, InvalidRequestError, NotFoundError, invalid_field
from app.core.ids import new_id
from app.core.off_loop import off_loop
from app.results.rows import ResultRow
from app.results.submission import Accepted, SubmissionOutcome

router = APIRouter(tags=["openai"])
raw = APIRouter(tags=["openai"])

PATH = "/v1/responses"
_CANCEL_WAIT_SECONDS = 2.0
_EXAMPLE = {"model": "demo", "input": "What does os.path.join do?", "max_output_tokens": 40}
_ON_DISCONNECT = {
    "X-On-Disconnect": {
        "schema": {"enum": ["cancel", "continue"], "default": "cancel"},
        "description": "Cancel or continue if the client disconnects; in the background it continues.",
    }
}
_STREAM = {MEDIA_TYPE: {"schema": {"type": "string"}}}


@raw.post(
    PATH,
    response_model=None,
    responses={200: {"model": ResponseRead, "content": _STREAM}},
    openapi_extra=describe(
        header=KEY_HEADER | _ON_DISCONNECT, body=ResponseCreate, example=_EXAMPLE
    ),
)
async def create_response(request: Request) -> Response:
    """Create a response: awaited, streamed, or in the background.

    One in the background continues without its client; another is cancelled when its client disconnects,
    unless the request has `X-On-Disconnect: continue`.
    """
    create = parse(ResponseCreate, await body_of(request))
    try:
        prepared = await prepare_response(services_of(request), principal_of(request), create)
        response = await _respond_by(request, create, prepared)
    except InvalidRequestError as error:
        error.errors = [FieldError(_member(one.field), one.message) for one in error.errors]
        raise
    response.headers.update(prepared.warnings)
    return response


@router.post("/v1/responses/compact", include_in_schema=False)
@router.post("/v1/responses/input_tokens", include_in_schema=False)
async def refuse_operation() -> None:
    """Paths of OpenAI's that are no ids: clients do without them after 404, and not after 405."""
    raise NotFoundError("The service does not have this operation.")


@router.get(
    "/v1/responses/{response_id}",
    response_model=None,
    responses={200: {"model": ResponseRead, "content": _STREAM}},
)
async def read_response(
    response_id: str,
    services: ServicesOf,
    team: TeamOf,
    stream: Annotated[bool, Query(description="Stream its events, from the first.")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, lt=2**53, description="Only events with a greater number.")
    ] = None,
) -> Response:
    """Read a response, or stream its past and future events."""
    row, amount = await services.results.get_charged(team, from_response_id(response_id))
    stored = _counted(services, stored_of(row), row)
    if not stream:
        return await _respond(stored, row)
    after = -1 if starting_after is None else starting_after
    if after // ATTEMPT_STEP >= max(row.attempt, 1):
        raise invalid_field("starting_after", "no such event exists yet")
    services.hub.reserve_place(team)
    release(amount)  # its text is read again
    events = ResponseEvents(stored, row.id, after)
    return EventStreamResponse(response_frames(services, team, row.id, events, resumable=True))


@router.get("/v1/responses/{response_id}/input_items", response_model=InputItemListRead)
async def list_input_items(
    response_id: str,
    services: ServicesOf,
    team: TeamOf,
    after: Annotated[
        str | None, Query(description="The id of the last item of the previous page.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the input items of a response's request."""
    row = await services.results.get(team, from_response_id(response_id))
    items = stored_of(row).input
    if count_images(items):
        context = await services.contexts.get(team, row.context_id)
        items = with_images(items, context.messages or ())
    page = page_of(items, after=after, limit=limit, order=order)
    return json_response(page_to_wire(page, limit))


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseRead)
async def cancel_response(response_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Cancel a response in the background; idempotent."""
    result_id = from_response_id(response_id)
    row = await services.results.get(team, result_id)
    stored = _counted(services, stored_of(row), row)
    if not stored.background:
        raise invalid_field("response_id", "only a response in the background can be cancelled")
    await services.queue.cancel(team, id=result_id)
    seconds = 0.0 if services.hub.is_full_for(team) else _CANCEL_WAIT_SECONDS
    return await _respond(stored, await services.hub.wait_terminal(team, result_id, seconds))


@router.delete("/v1/responses/{response_id}", response_model=DeletedRead)
async def delete_response(response_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Delete a response and its conversation up to it; a running one is stopped."""
    row = await services.results.get(team, from_response_id(response_id))
    stored_of(row)
    await services.contexts.delete(team, row.context_id, force=True)
    deleted = DeletedRead(id=to_response_id(row.id), object="response", deleted=True)
    return json_response(deleted.model_dump())


async def _respond_by(
    request: Request, create: ResponseCreate, prepared: PreparedResponse
) -> Response:
    if create.stream:
        return await _respond_stream(request, prepared)
    if create.background:
        return await _respond_at_once(request, prepared)
    return await respond_complete(
        request,
        prepared.group,
        lambda rows: json_response(response_to_wire(prepared.stored, rows[0])),
    )


async def _respond(stored: StoredRequest, row: ResultRow) -> Response:
    return json_response(await _to_wire(stored, row))


async def _to_wire(stored: StoredRequest, row: ResultRow) -> dict[str, Any]:
    return await off_loop(row.output_size, lambda: response_to_wire(stored, row))


def _member(field: str) -> str:
    names = {"content": "input", "messages": "input", "parameters.max_tokens": "max_output_tokens"}
    return names.get(field, field.removeprefix("parameters."))


async def _respond_at_once(request: Request, prepared: PreparedResponse) -> Response:
    services = services_of(request)
    answer, stored = await _submit(request, services, prepared)
    if isinstance(answer, Accepted):
        wire = bare_response(stored, answer.result_id, "queued")
    else:
        wire = await _to_wire(stored, answer.row)
    return json_response(wire, 200, id_headers([answer]))


async def _respond_stream(request: Request, prepared: PreparedResponse) -> Response:
    services, team = services_of(request), team_of(request)
    services.hub.reserve_place(team)
    answer, stored = await _submit(request, services, prepared)
    result_id = answer.result_id
    is_cancelled = with_headers(request, prepared.group).on_disconnect == "cancel"
    events = ResponseEvents(stored, result_id)

    async def frames() -> AsyncGenerator[bytes, None]:
        followed = response_frames(services, team, result_id, events, resumable=stored.background)
        async with contextlib.aclosing(followed) as encoded:
            async for frame in encoded:
                yield frame
        await leave()  # an interrupted stream leaves running results without a reader
        if events.is_over and not prepared.group.store:
            await erase_delivered(services, [result_id])

    async def leave() -> None:
        if is_cancelled and not stored.background and not events.is_over:
            await services.groups.cancel(team, [result_id])

    return EventStreamResponse(frames(), id_headers([answer]), on_disconnect=leave)


async def _submit(
    request: Request, services: Services, prepared: PreparedResponse
) -> tuple[SubmissionOutcome, StoredRequest]:
    group = with_headers(request, prepared.group)
    if prepared.stored.background:
        group = replace(group, on_disconnect="continue")
    result_id, team = new_id(), team_of(request)
    with services.hub.reading(team, result_id):  # in the reserved place, if it is streamed
        (answer,) = await services.submissions.submit_group(
            principal_of(request), group, [result_id]
        )
    if isinstance(answer, Accepted):
        return answer, prepared.stored
    known = StoredRequest.of(answer.row.request, answer.row.parameters)
    return answer, _counted(services, known, answer.row) if known else prepared.stored


def _counted(services: Services, stored: StoredRequest, row: ResultRow) -> StoredRequest:
    """The stored request with the tokenizer of its model, if this process has that."""
    return stored.counted_by(counter_of(services.registry.format_of(row.model_name)))
