"""/v1/batches: OpenAI's batches: run the requests of a file, write the responses to another."""

from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response

from app.api.container import Services
from app.api.dependencies import PrincipalOf, ServicesOf, TeamOf, from_wire_id
from app.api.errors.error_responses import refusal
from app.api.idempotency_header import KEY_HEADER, REPLAYED_HEADER, idempotency_key
from app.api.json_codec import json_response, parse
from app.api.openai.batches_schemas import (
    BatchCreate,
    BatchListRead,
    BatchRead,
    batch_to_wire,
    page_to_wire,
    to_new_batch,
)
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import CompletionRequest
from app.api.openai.embeddings_router import PATH as EMBEDDINGS, prepare_embeddings
from app.api.openai.embeddings_schemas import EmbeddingRequest, embeddings
from app.api.openai.responses_output import response_to_wire
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.responses_serving import prepare_response
from app.api.openai.serving import prepare_chat, prepare_completion
from app.api.raw_routes import body_of, describe
from app.auth.principal import Principal
from app.batches.dialect import LineRequest
from app.batches.rows import Batch
from app.core.byte_budget import read_within
from app.core.errors import NotFoundError, ServiceError, invalid_field
from app.queue.idempotency import hash_request

router = APIRouter(tags=["openai"])

_BATCH_BYTES = 32_768  # of a batch with its errors, about
_EXAMPLE = {
    "input_file_id": "file-0199a0f2-7c5d-7b3a-a1c5-e0f1d2c3b4a5",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


@router.post(
    "/v1/batches",
    response_model=BatchRead,
    openapi_extra=describe(header=KEY_HEADER, body=BatchCreate, example=_EXAMPLE),
)
async def create_batch(request: Request, services: ServicesOf, principal: PrincipalOf) -> Response:
    """Run the requests of a file within a day, as capacity allows."""
    team = principal.team_id
    create = parse(BatchCreate, await body_of(request))
    key = None
    if (text := idempotency_key(request)) is not None:
        key = services.keys.new(text, hash_request(create.model_dump(exclude_defaults=True)))
        if (known := await services.batches.find(team, key)) is not None:
            return _replayed(known)
    file = await services.files.get(team, from_wire_id("file-", create.input_file_id, "file"))
    if file.purpose != "batch":
        raise invalid_field("input_file_id", f"is a file for `{file.purpose}`, not for `batch`")
    new = to_new_batch(principal, create, file.id, key)
    batch, is_new = await services.batches.create(new)
    return json_response(batch_to_wire(batch)) if is_new else _replayed(batch)


def _replayed(batch: Batch) -> Response:
    return json_response(batch_to_wire(batch), headers={REPLAYED_HEADER: "true"})


@router.get("/v1/batches", response_model=BatchListRead)
async def list_batches(
    services: ServicesOf,
    team: TeamOf,
    after: Annotated[
        str | None, Query(description="The id of the last batch of the previous page.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List batches, newest first."""
    behind = None if after is None else from_wire_id("batch_", after, "batch")
    batches, _ = await read_within(
        limit * _BATCH_BYTES,
        lambda: services.batches.list(team, behind, limit + 1),
        lambda read: sum(len(batch.metadata) + len(batch.errors) for batch in read),
    )
    return json_response(page_to_wire([batch_to_wire(batch) for batch in batches], limit))


@router.get("/v1/batches/{batch_id}", response_model=BatchRead)
async def read_batch(batch_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Read a batch."""
    return json_response(batch_to_wire(await _get(services, team, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchRead)
async def cancel_batch(batch_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Stop a batch: its files contain the requests done by then. Idempotent; 409 once it has ended."""
    batch = await _get(services, team, batch_id)
    return json_response(batch_to_wire(await services.batches.cancel(team, batch.id)))


async def _get(services: Services, team: str, batch_id: str) -> Batch:
    batch = await services.batches.get(team, from_wire_id("batch_", batch_id, "batch"))
    if batch.is_of_messages:
        raise NotFoundError(f"There is no batch {batch.id}.")
    return batch


class OpenAIBatches:
    """OpenAI's endpoints for `BatchDialect`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def read(self, principal: Principal, endpoint: str, body: bytes) -> LineRequest:
        services, team_id = self._services, principal.team_id
        if endpoint == "/v1/responses":
            prepared_response = await prepare_response(
                services, principal, parse(ResponseCreate, body)
            )
            return LineRequest(
                prepared_response.group,
                lambda rows: response_to_wire(prepared_response.stored, rows[0]),
            )
        if endpoint == EMBEDDINGS:
            wanted = parse(EmbeddingRequest, body)
            group = await prepare_embeddings(services, wanted)
            return LineRequest(group, lambda rows: embeddings(wanted, rows))
        if endpoint == "/v1/completions":
            prepared = await prepare_completion(services, team_id, parse(CompletionRequest, body))
        else:
            prepared = await prepare_chat(services, team_id, parse(ChatRequest, body))
        return LineRequest(prepared.group, prepared.answer)

    def refuse(self, endpoint: str, error: ServiceError) -> tuple[int, object]:
        response = refusal(endpoint, error)
        return response.status_code, orjson.loads(bytes(response.body))
