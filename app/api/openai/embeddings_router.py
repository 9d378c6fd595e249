"""OpenAI's /v1/embeddings."""

from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.container import Services
from app.api.dependencies import services_of
from app.api.disconnects import ON_DISCONNECT_HEADER
from app.api.group_responses import respond_complete
from app.api.idempotency_header import KEY_HEADER
from app.api.json_codec import json_response, parse
from app.api.openai.embeddings_schemas import EmbeddingRequest, embeddings
from app.api.openai.serving import read_prompt
from app.api.raw_routes import body_of, describe
from app.core.errors import FieldError, InvalidRequestError
from app.results.drafts import GroupRequest, Prompt
from app.results.pooling import choose_model

raw = APIRouter(tags=["openai"])

PATH = "/v1/embeddings"
_HEADERS: dict[str, Any] = KEY_HEADER | ON_DISCONNECT_HEADER
_EXAMPLE = {"model": "bge-small-en", "input": ["What is a tensor?", "An array of numbers."]}
_INPUT = {"content", "prompt", "messages"}


@raw.post(
    PATH,
    operation_id="create_embeddings",
    summary="Compute the vectors of texts",
    openapi_extra=describe(header=_HEADERS, body=EmbeddingRequest, example=_EXAMPLE),
)
async def create_embeddings(request: Request) -> Response:
    """OpenAI's embeddings. `X-Result-Id` lists the results, one per text (docs/embeddings.md)."""
    body = parse(EmbeddingRequest, await body_of(request))
    try:
        group = await prepare_embeddings(services_of(request), body)
        return await respond_complete(
            request, group, lambda rows: json_response(embeddings(body, rows))
        )
    except InvalidRequestError as error:
        error.errors = [
            FieldError(
                "input" if one.field in _INPUT else one.field.removeprefix("embedding."),
                one.message,
            )
            for one in error.errors
        ]
        raise


async def prepare_embeddings(services: Services, request: EmbeddingRequest) -> GroupRequest:
    model = await choose_model(services.registry, request.model, "embed")
    prompts = [await read_prompt(model, one) for one in request.input]
    return GroupRequest(
        model.name,
        [Prompt(content=one.content or one.text, token_ids=one.token_ids) for one in prompts],
        request.to_send_options(),
        store=request.store is not False,
    )
