"""OpenAI's /v1/chat/completions, /v1/completions and /v1/models: https://platform.openai.com/docs"""

from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.dependencies import ServicesOf, TeamOf, services_of, team_of
from app.api.disconnects import ON_DISCONNECT_HEADER
from app.api.group_responses import respond_complete, respond_stream
from app.api.idempotency_header import KEY_HEADER
from app.api.json_codec import json_response, parse
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import CompletionRequest
from app.api.openai.serving import PreparedRequest, prepare_chat, prepare_completion
from app.api.raw_routes import body_of, describe
from app.core.errors import FieldError, InvalidRequestError
from app.inference.model_registry import Model

raw = APIRouter(tags=["openai"])
router = APIRouter(tags=["openai"])


_HEADERS: dict[str, Any] = KEY_HEADER | ON_DISCONNECT_HEADER
_CHAT_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "What is a tensor?"}]}
_TEXT_EXAMPLE = {"model": "demo", "prompt": "import os\n", "max_tokens": 16}


@raw.post(
    "/v1/chat/completions",
    operation_id="create_chat_completion",
    summary="Continue a conversation",
    openapi_extra=describe(header=_HEADERS, body=ChatRequest, example=_CHAT_EXAMPLE),
)
async def create_chat_completion(request: Request) -> Response:
    """OpenAI's chat completions; `stream` returns chunks. `X-Result-Id` lists the results."""
    body = parse(ChatRequest, await body_of(request))
    prepared = await prepare_chat(services_of(request), team_of(request), body)
    return await _answer(request, prepared, "messages")


@raw.post(
    "/v1/completions",
    operation_id="create_completion",
    summary="Continue a text",
    openapi_extra=describe(header=_HEADERS, body=CompletionRequest, example=_TEXT_EXAMPLE),
)
async def create_completion(request: Request) -> Response:
    """OpenAI's text completions; `stream` returns chunks. `X-Result-Id` lists the results."""
    body = parse(CompletionRequest, await body_of(request))
    prepared = await prepare_completion(services_of(request), team_of(request), body)
    return await _answer(request, prepared, "prompt")


async def _answer(request: Request, prepared: PreparedRequest, prompt: str) -> Response:
    try:
        if prepared.request.stream:
            return await respond_stream(
                request, prepared.group, prepared.encode, with_tokens=prepared.with_tokens
            )
        return await respond_complete(
            request, prepared.group, lambda rows: json_response(prepared.answer(rows))
        )
    except InvalidRequestError as error:
        error.errors = [
            FieldError(
                prompt if one.field == "content" else one.field.removeprefix("parameters."),
                one.message,
            )
            for one in error.errors
        ]
        raise


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_openai_models(services: ServicesOf, team_id: TeamOf) -> Response:
    """List the models that are ready, and their adapters."""
    ready = [model for model in services.registry.all() if model.ready]
    models = [_to_wire(model, name) for model in ready for name in model.names_of(team_id)]
    return json_response({"object": "list", "data": models})


@router.get("/v1/models/{model:path}")
async def read_openai_model(model: str, services: ServicesOf, team_id: TeamOf) -> Response:
    """Read one model."""
    found = await services.registry.find(model, team_id)
    return json_response(_to_wire(found, found.full_name))


def _to_wire(model: Model, name: str) -> dict[str, Any]:
    seen_at = model.first_seen_at  # Triton has no time of creation
    return {
        "id": name,
        "object": "model",
        "created": int(seen_at.timestamp()) if seen_at else 0,
        "owned_by": "llm-api-service",
        "max_model_len": model.max_model_len,
    } | ({} if name == model.name else {"parent": model.name})
