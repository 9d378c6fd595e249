"""/v1/messages: create a message, whole or streamed, and count the tokens of a conversation."""

from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.anthropic.messages import MessageRead, TokenCountRead
from app.api.anthropic.schemas import MessageRequest, TokenCountRequest
from app.api.anthropic.serving import count_tokens, prepare_message
from app.api.dependencies import services_of, team_of
from app.api.disconnects import ON_DISCONNECT_HEADER
from app.api.errors.anthropic_errors import VERSION_HEADER
from app.api.group_responses import respond_complete, respond_stream
from app.api.hosted_tools import warnings_of
from app.api.idempotency_header import KEY_HEADER
from app.api.json_codec import json_response, parse
from app.api.raw_routes import body_of, describe
from app.api.sse import MEDIA_TYPE
from app.core.errors import FieldError, InvalidRequestError

raw = APIRouter(tags=["anthropic"])

PATH = "/v1/messages"
_VERSION_HEADER = {
    VERSION_HEADER: {"schema": {"type": "string"}, "description": "Ignored."},
    "anthropic-beta": {"schema": {"type": "string"}, "description": "Ignored."},
}
_HEADERS: dict[str, Any] = KEY_HEADER | ON_DISCONNECT_HEADER | _VERSION_HEADER
_CONVERSATION = {"model": "demo", "messages": [{"role": "user", "content": "What is a tensor?"}]}
_STREAM = {MEDIA_TYPE: {"schema": {"type": "string"}}}
_NAMES = {"content": "messages", "stop": "stop_sequences", "structured_outputs": "output_config"}


@raw.post(
    PATH,
    operation_id="create_message",
    summary="Continue a conversation, as Anthropic's Messages API does",
    response_model=None,
    responses={200: {"model": MessageRead, "content": _STREAM}},
    openapi_extra=describe(
        header=_HEADERS, body=MessageRequest, example=_CONVERSATION | {"max_tokens": 64}
    ),
)
async def create_message(request: Request) -> Response:
    """Anthropic's messages; `stream` returns events. `X-Result-Id` is the id of the result."""
    body = parse(MessageRequest, await body_of(request))
    try:
        prepared = await prepare_message(services_of(request), team_of(request), body)
        if body.stream:
            response = await respond_stream(request, prepared.group, prepared.encode)
        else:
            response = await respond_complete(
                request, prepared.group, lambda rows: json_response(prepared.answer(rows))
            )
    except InvalidRequestError as error:
        error.errors = [FieldError(_member(one.field), one.message) for one in error.errors]
        raise
    response.headers.update(prepared.warnings)
    return response


@raw.post(
    f"{PATH}/count_tokens",
    operation_id="count_message_tokens",
    summary="Count the tokens of a conversation",
    response_model=None,
    responses={200: {"model": TokenCountRead}},
    openapi_extra=describe(header=_VERSION_HEADER, body=TokenCountRequest, example=_CONVERSATION),
)
async def count_message_tokens(request: Request) -> Response:
    """Tokens of the prompt that the model's template makes of a conversation; nothing is stored."""
    body = parse(TokenCountRequest, await body_of(request))
    count = await count_tokens(services_of(request), team_of(request), body)
    return json_response({"input_tokens": count}, headers=warnings_of([*body.hosted.values()]))


def _member(field: str) -> str:
    name, dot, rest = field.removeprefix("parameters.").partition(".")
    return _NAMES.get(name, name) + dot + rest
