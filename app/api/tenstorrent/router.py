"""Tenstorrent's inference API: POST /inference/{model}, which streams raw text.

The response has no frames, so it cannot carry an error. Errors before the first byte have a status;
after it the connection is cut, and the chunked body has no end.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from app.api.dependencies import services_of, team_of
from app.api.disconnects import ON_DISCONNECT_HEADER
from app.api.errors.error_responses import refusal_of
from app.api.group_responses import RESULT_ID_HEADER, Events, respond_stream
from app.api.idempotency_header import KEY_HEADER
from app.api.raw_routes import body_of, describe
from app.api.sse import MEDIA_TYPE, CutOffError, EventStreamResponse
from app.api.tenstorrent.schemas import (
    DEFAULT_MAX_TOKENS,
    Inference,
    InferenceRequest,
    parse_inference,
)
from app.core.errors import ServiceError
from app.inference.model_registry import Model
from app.results.drafts import GroupRequest, Prompt
from app.results.requests import SendOptions
from app.results.streams.result_reader import TextDelta

raw = APIRouter(tags=["Tenstorrent"])

_EXAMPLE = {"text": "def ", "temperature": "0.7", "top_k": 10, "max_tokens": "20"}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The text, as it comes.", "content": {MEDIA_TYPE: {}}}
}


def _describe(**path: str) -> dict[str, Any]:
    headers = ON_DISCONNECT_HEADER | KEY_HEADER
    return describe(path=path, header=headers, body=InferenceRequest, example=_EXAMPLE)


@raw.post(
    "/inference/{model}", responses=_RESPONSES, openapi_extra=_describe(model="A model's name.")
)
async def infer(request: Request) -> Response:
    """Continue a text. The response is the raw text; `X-Result-Id` names its result."""
    wanted = parse_inference(await body_of(request))
    model = await services_of(request).registry.find(request.path_params["model"], team_of(request))
    return await _answer(request, model, wanted)


@raw.post("/inference", responses=_RESPONSES, openapi_extra=_describe())
async def infer_with_default(request: Request) -> Response:
    """Continue a text with the model of the setting LLM_DEFAULT_MODEL."""
    wanted = parse_inference(await body_of(request))
    model = await services_of(request).registry.default(team_of(request))
    return await _answer(request, model, wanted)


class RawTextResponse(EventStreamResponse):
    """Text without frames. The response starts with its first piece: until then an error has a status."""

    _has_json = False

    async def _send_all(
        self, scope: Scope, receive: Receive, send: Send, first: bytes = b""
    ) -> None:
        try:
            first = await anext(self._frames, b"")
        except ServiceError as error:
            response = refusal_of(scope, error)
            response.headers[RESULT_ID_HEADER] = self.headers[RESULT_ID_HEADER]
            await response(scope, receive, send)
            return
        await super()._send_all(scope, receive, send, first)


async def _answer(request: Request, model: Model, wanted: Inference) -> Response:
    max_tokens = wanted.max_tokens
    if max_tokens is None:
        left = await model.tokens_left(wanted.text)
        max_tokens = DEFAULT_MAX_TOKENS if left is None else max(1, min(DEFAULT_MAX_TOKENS, left))
    options = SendOptions(parameters=wanted.to_sampling(max_tokens))
    group = GroupRequest(model.full_name, [Prompt(content=wanted.text)], options)

    async def encode(_ids: Sequence[UUID], events: Events) -> AsyncGenerator[bytes, None]:
        pending = wanted.text if wanted.returns_prompt else ""
        is_begun = False
        try:
            async for _, event in events:
                if isinstance(event, TextDelta) and event.text:
                    yield (pending + event.text).encode()
                    pending, is_begun = "", True
        except ServiceError as error:
            if is_begun:
                raise CutOffError(error.code) from error
            raise
        if pending:
            yield pending.encode()

    return await respond_stream(request, group, encode, response_type=RawTextResponse)
