"""OpenAI's /v1/chat/completions and /v1/completions: https://platform.openai.com/docs"""

from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.dependencies import services_of, team_of
from app.api.disconnects import ON_DISCONNECT_HEADER
from app.api.group_responses import respond_complete, respond_stream
from app.api.idempotency_header import KEY_HEADER
from app.api.json_codec import json_response, parse
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import CompletionRequest
from app.api.openai.serving import PreparedRequest, prepare_chat, prepare_completion
from app.api.raw_routes import body_of, describe
from app.core.errors import FieldError, InvalidRequestError

raw = APIRouter(tags=["openai"])

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
