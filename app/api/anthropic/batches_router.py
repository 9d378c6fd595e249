"""/v1/messages/batches: batches of messages, on the machinery of OpenAI's batches."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from app.api.anthropic.batches_schemas import (
    WINDOW_SECONDS,
    DeletedBatchRead,
    MessageBatchCreate,
    MessageBatchListRead,
    MessageBatchRead,
    batch_to_wire,
    result_to_wire,
    to_batch_id,
)
from app.api.anthropic.schemas import MessageRequest
from app.api.anthropic.serving import prepare_message
from app.api.container import Services
from app.api.dependencies import PrincipalOf, ServicesOf, TeamOf, from_wire_id
from app.api.downloads import DOWNLOAD_BYTES, download
from app.api.errors.error_responses import refusal
from app.api.idempotency_header import KEY_HEADER, REPLAYED_HEADER, idempotency_key
from app.api.json_codec import json_response, parse
from app.api.raw_routes import body_of, describe
from app.auth.principal import Principal
from app.batches.dialect import LineRequest
from app.batches.files import FileDetails
from app.batches.lines import split_lines
from app.batches.rows import MESSAGES, Batch, NewBatch
from app.core.byte_budget import read_within
from app.core.errors import (
    ConflictError,
    IdempotencyConflictError,
    LimitError,
    NotFoundError,
    ServiceError,
    invalid_field,
)
from app.core.ids import new_id
from app.queue.idempotency import NewKey, hash_request

router = APIRouter(tags=["anthropic"])

PATH = "/v1/messages/batches"
_BATCH_BYTES = 4_096  # of a batch, at most
_MAX_OUTCOME_BYTES = 2**31  # of a line: files of batches are our own
_EXAMPLE = {
    "requests": [
        {
            "custom_id": "first",
            "params": {
                "model": "demo",
                "max_tokens": 16,
                "messages": [{"role": "user", "content": "What is a tensor?"}],
            },
        }
    ]
}


@router.post(
    PATH,
    response_model=MessageBatchRead,
    openapi_extra=describe(header=KEY_HEADER, body=MessageBatchCreate, example=_EXAMPLE),
)
async def create_message_batch(
    request: Request, services: ServicesOf, principal: PrincipalOf
) -> Response:
    """Create many messages within a day, as capacity allows."""
    create = parse(MessageBatchCreate, await body_of(request), refuses_nul=False)
    if len(create.requests) > services.settings.max_batch_lines:
        most = services.settings.max_batch_lines
        raise invalid_field("requests", f"must be at most {most} (LLM_MAX_BATCH_LINES)")
    key = None
    if (text := idempotency_key(request)) is not None:
        key = services.keys.new(text, hash_request(create.model_dump()))
        if (known := await services.batches.find(principal.team_id, key)) is not None:
            return _respond(request, known, is_replayed=True)
    batch, is_new = await _create(services, principal, create, key)
    return _respond(request, batch, is_replayed=not is_new)


@router.get(PATH, response_model=MessageBatchListRead)
async def list_message_batches(
    request: Request,
    services: ServicesOf,
    team: TeamOf,
    before_id: Annotated[str | None, Query(description="Only batches before this one.")] = None,
    after_id: Annotated[str | None, Query(description="Only batches behind this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Response:
    """List batches of messages, newest first."""
    before, after = (None if one is None else _parse_id(one) for one in (before_id, after_id))
    batches, _ = await read_within(
        limit * _BATCH_BYTES,
        lambda: services.batches.list(team, after, limit + 1, before=before, is_of_messages=True),
        lambda read: _BATCH_BYTES * len(read),
    )
    page = batches[-limit:] if before is not None else batches[:limit]
    data = [batch_to_wire(batch, str(request.base_url)) for batch in page]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = len(batches) > limit
    return json_response({"data": data, "has_more": has_more, "first_id": first, "last_id": last})


@router.get(f"{PATH}/{{message_batch_id}}", response_model=MessageBatchRead)
async def read_message_batch(
    message_batch_id: str, request: Request, services: ServicesOf, team: TeamOf
) -> Response:
    """Read a batch of messages."""
    return _respond(request, await _get(services, team, message_batch_id))


@router.post(f"{PATH}/{{message_batch_id}}/cancel", response_model=MessageBatchRead)
async def cancel_message_batch(
    message_batch_id: str, request: Request, services: ServicesOf, team: TeamOf
) -> Response:
    """Stop a batch: its results have the messages made by then. Idempotent; 409 once it has ended."""
    batch = await _get(services, team, message_batch_id)
    return _respond(request, await services.batches.cancel(team, batch.id))


@router.get(
    f"{PATH}/{{message_batch_id}}/results",
    response_class=Response,
    responses={
        200: {
            "description": "A JSON object per line: `custom_id` and `result`.",
            "content": {"application/x-jsonl": {"schema": {"type": "string"}}},
        }
    },
)
async def read_message_batch_results(
    message_batch_id: str, services: ServicesOf, team: TeamOf
) -> Response:
    """Read the results of a batch that has ended, in any order."""
    services.hub.reserve_place(team)
    batch = await _get(services, team, message_batch_id)
    if batch.ended_at is None:
        raise ConflictError(f"Batch {to_batch_id(batch.id)} has not ended yet: it has no results.")
    results = _results(services, team, batch)
    # Until the first result is read, an error has a status.
    first = await anext(results, b"")
    content = download(services, team, first, results)
    return StreamingResponse(content, 200, {}, "application/x-jsonl")


@router.delete(f"{PATH}/{{message_batch_id}}", response_model=DeletedBatchRead)
async def delete_message_batch(
    message_batch_id: str, services: ServicesOf, team: TeamOf
) -> Response:
    """Delete a batch that has ended, and its files; the results of its messages stay."""
    batch = await _get(services, team, message_batch_id)
    await services.batches.delete(team, batch.id)
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        await _delete_file(services, team, file_id)
    deleted = DeletedBatchRead(id=to_batch_id(batch.id), type="message_batch_deleted")
    return json_response(deleted.model_dump())


class MessageBatches:
    """The endpoint of messages for `BatchDialect`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def read(self, principal: Principal, _endpoint: str, body: bytes) -> LineRequest:
        request = parse(MessageRequest, body)
        prepared = await prepare_message(self._services, principal.team_id, request)
        return LineRequest(prepared.group, prepared.answer)

    def refuse(self, endpoint: str, error: ServiceError) -> tuple[int, object]:
        response = refusal(endpoint, error)
        return response.status_code, orjson.loads(bytes(response.body))


async def _create(
    services: Services, principal: Principal, create: MessageBatchCreate, key: NewKey | None
) -> tuple[Batch, bool]:
    team = principal.team_id
    await services.files.check_room(team)
    writer = services.files.writer(team)
    batch_id = new_id()
    try:
        for one in create.requests:
            await writer.write(one.to_line())
        details = FileDetails("batch", f"{to_batch_id(batch_id)}.jsonl")
        file = await services.files.finish(team, writer, details)
    finally:
        await writer.discard()
    new = NewBatch(
        id=batch_id,
        team_id=team,
        endpoint=MESSAGES,
        input_file_id=file.id,
        completion_window="24h",
        metadata=orjson.dumps({"requests": len(create.requests)}).decode(),
        window_seconds=WINDOW_SECONDS,
        output_seconds=None,
        key=key,
        token_id=principal.token_id,
    )
    try:
        batch, is_new = await services.batches.create(new)
    except (LimitError, IdempotencyConflictError):
        await _delete_file(services, team, file.id)
        raise
    if not is_new:
        await _delete_file(services, team, file.id)
    return batch, is_new


async def _delete_file(services: Services, team: str, file_id: Any) -> None:
    if file_id is not None:
        try:
            await services.files.delete(team, file_id)
        except NotFoundError:
            return


async def _results(services: Services, team: str, batch: Batch) -> AsyncGenerator[bytes, None]:
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is None:
            continue
        pieces = services.files.read(team, file_id, DOWNLOAD_BYTES)
        async for line in split_lines(pieces, _MAX_OUTCOME_BYTES):
            if line:
                yield result_to_wire(line)


async def _get(services: Services, team: str, message_batch_id: str) -> Batch:
    batch = await services.batches.get(team, _parse_id(message_batch_id))
    if not batch.is_of_messages:
        raise NotFoundError(f"There is no batch {batch.id}.")
    return batch


def _parse_id(text: str) -> Any:
    return from_wire_id("msgbatch_", text, "batch of messages")


def _respond(request: Request, batch: Batch, *, is_replayed: bool = False) -> Response:
    headers = {REPLAYED_HEADER: "true"} if is_replayed else None
    return json_response(batch_to_wire(batch, str(request.base_url)), headers=headers)
