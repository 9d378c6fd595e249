"""Text Generation Inference: /generate, /generate_stream, POST /, /tokenize, /chat_tokenize, /info, /ping.

https://huggingface.github.io/text-generation-inference/. TGI's clients use the OpenAI dialect for chat
and completions.
"""

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import chain
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from app import __version__
from app.api.dependencies import Name, ServicesOf, services_of, team_of
from app.api.disconnects import ON_DISCONNECT_HEADER
from app.api.errors.tgi_errors import UNHEALTHY, to_error
from app.api.group_responses import Events, respond_complete, respond_stream
from app.api.health import check_health
from app.api.idempotency_header import KEY_HEADER, idempotency_key
from app.api.json_codec import JSON, json_response, parse
from app.api.raw_routes import body_of, describe
from app.api.sse import KEEP_ALIVE, MEDIA_TYPE, EventStreamResponse
from app.api.tgi.response_schemas import (
    EventWriter,
    best_first,
    encode_frame,
    generation_to_wire,
    headers_of,
    info_to_wire,
    token_frames,
)
from app.api.tgi.schemas import (
    ChatTokenizeRequest,
    CompatGenerateRequest,
    GenerateRequest,
    Generation,
    check,
    check_length,
    choose_seed,
    is_sampling,
    to_messages,
    to_sampling,
)
from app.core.byte_budget import charge
from app.core.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    NotFoundError,
    ServiceError,
    UnknownModelError,
    invalid_field,
)
from app.inference.encoding import TokenizedText
from app.inference.model_registry import Model
from app.inference.prompts import PromptFormat
from app.results.drafts import GroupRequest, Prompt
from app.results.requests import SendOptions
from app.results.rows import ResultRow
from app.results.streams.result_reader import Ended, TextDelta

router = APIRouter(tags=["Text Generation Inference"])
raw = APIRouter(tags=["Text Generation Inference"])


_TOKEN_COPIES = 3  # of the text's size, at a token a character and twelve bytes a token

_EXAMPLE = {"inputs": "def ", "parameters": {"max_new_tokens": 20, "details": True}}
_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "What is a tensor?"}]}
_REUSE_HEADER = {
    "X-Reuse": {
        "schema": {"type": "string", "enum": ["true", "false"], "default": "false"},
        "description": "The member `reuse`, for clients that cannot send it.",
    }
}
_HEADERS = ON_DISCONNECT_HEADER | KEY_HEADER | _REUSE_HEADER


def describe_generation(body: type[BaseModel], example: object = _EXAMPLE) -> dict[str, Any]:
    described: dict[str, Any] = describe(header=_HEADERS, body=body, example=example)
    return described


@raw.post(
    "/generate",
    responses={200: {"description": "The generated text."}},
    openapi_extra=describe_generation(GenerateRequest),
)
async def generate(request: Request) -> Response:
    """Continue a prompt; responds when the text is complete. `X-Result-Id` names its result."""
    began = time.perf_counter()
    wanted = parse(GenerateRequest, await body_of(request))
    return await _respond_complete(request, wanted, began, is_listed=False)


@raw.post(
    "/generate_stream",
    responses={200: {"description": "One event per token.", "content": {MEDIA_TYPE: {}}}},
    openapi_extra=describe_generation(GenerateRequest),
)
async def generate_stream(request: Request) -> Response:
    """Continue a prompt, streamed token by token as server-sent events."""
    return await _respond_stream(request, parse(GenerateRequest, await body_of(request)))


@raw.post(
    "/",
    responses={
        200: {
            "description": "A list with the generated text, or one event per token.",
            "content": {JSON: {}, MEDIA_TYPE: {}},
        }
    },
    openapi_extra=describe_generation(CompatGenerateRequest, _EXAMPLE | {"stream": False}),
)
async def generate_at_root(request: Request) -> Response:
    """Respond as /generate, in a list; with `stream` as /generate_stream."""
    began = time.perf_counter()
    wanted = parse(CompatGenerateRequest, await body_of(request))
    if wanted.stream:
        return await _respond_stream(request, wanted)
    return await _respond_complete(request, wanted, began, is_listed=True)


@router.post(
    "/tokenize",
    responses={200: {"description": "The prompt's tokens."}},
    openapi_extra=describe(body=GenerateRequest, example=_EXAMPLE),
)
async def tokenize(request: Request) -> Response:
    """The tokens of `inputs`, including those that the model adds around a prompt."""
    wanted = parse(GenerateRequest, await body_of(request))
    model = await services_of(request).registry.choose(wanted.model, team_of(request))
    tokens = await _encode(model, wanted.inputs)
    return _stream_json(token_frames(wanted.inputs, tokens))


@router.post(
    "/chat_tokenize",
    responses={200: {"description": "The rendered prompt and its tokens."}},
    openapi_extra=describe(body=ChatTokenizeRequest, example=_CHAT_EXAMPLE),
)
async def tokenize_chat(request: Request) -> Response:
    """The prompt that the model's chat template renders from messages, and its tokens."""
    wanted = parse(ChatTokenizeRequest, await body_of(request))
    model = await services_of(request).registry.choose(wanted.model, team_of(request))
    if model.format is None or not model.has_chat:
        raise InvalidRequestError(f"{model.name} has no chat template")
    arguments = {"tools": wanted.tools} if wanted.tools else {}
    text = await model.format.render(to_messages(wanted), arguments)
    tokens = await _encode(model, text, add_special_tokens=False)
    templated = b',"templated_text":%b}' % orjson.dumps(text)
    return _stream_json(chain([b'{"tokenize_response":'], token_frames(text, tokens), [templated]))


@router.get("/info")
async def read_info(
    services: ServicesOf,
    model: Annotated[Name, Query(description="Default: LLM_DEFAULT_MODEL.")] = None,
) -> Response:
    """Properties of the model behind TGI's routes."""
    try:
        found = await services.registry.choose(model)
    except (UnknownModelError, InvalidRequestError) as error:
        # A reader without a token gets no list of models.
        raise type(error)("There is no such model; `?model=`, with a token, names one.") from None
    return json_response(info_to_wire(found.name, found.max_model_len, __version__))


@router.head("/ping", include_in_schema=False)
@router.head("/", include_in_schema=False)
@router.get("/ping", response_class=Response)
@router.get("/", operation_id="read_root_health", response_class=Response)
async def read_health(services: ServicesOf) -> Response:
    """The same as /health, with TGI's body of an unhealthy server."""
    try:
        check_health(services)
    except ModelNotReadyError as error:
        return json_response(UNHEALTHY, error.status, error.headers)
    return Response()


async def _respond_complete(
    request: Request, wanted: GenerateRequest, began: float, *, is_listed: bool
) -> Response:
    generation, group = await prepare(request, wanted, is_stream=False)
    return await respond_text(request, generation, group, began, is_listed=is_listed)


async def respond_text(
    request: Request, generation: Generation, group: GroupRequest, began: float, *, is_listed: bool
) -> Response:
    """The complete text of a prepared generation, in a list if `is_listed`."""
    validated = time.perf_counter() - began

    def render(rows: Sequence[ResultRow]) -> Response:
        ordered = best_first(rows)
        answer = generation_to_wire(generation, ordered)
        headers = headers_of(generation, ordered[0], validated)
        return json_response([answer] if is_listed else answer, headers=headers)

    return await respond_complete(request, group, render)


async def _respond_stream(request: Request, wanted: GenerateRequest) -> Response:
    generation, group = await prepare(request, wanted, is_stream=True)
    writer = EventWriter(generation)

    async def encode(_ids: Sequence[UUID], events: Events) -> AsyncGenerator[bytes, None]:
        try:
            async for _, event in events:
                if isinstance(event, TextDelta):
                    if frames := writer.add(event.text, event.tokens):
                        yield frames
                elif isinstance(event, Ended):
                    yield writer.end(event.row)
                else:
                    yield KEEP_ALIVE
        except ServiceError as error:
            yield encode_frame(to_error(error)[1])

    response = await respond_stream(request, group, encode, with_tokens=True, media_type=MEDIA_TYPE)
    response.headers["x-compute-characters"] = str(len(wanted.inputs))
    return response


async def prepare(
    request: Request, wanted: GenerateRequest, *, is_stream: bool
) -> tuple[Generation, GroupRequest]:
    """The validated request, and its submission. Raises ServiceError."""
    given = check(wanted, is_stream=is_stream)
    services = services_of(request)
    model = await services.registry.choose(
        wanted.model, team_of(request), adapter=given.adapter_id or None
    )
    most, known = model.max_model_len, model.format
    best_of = given.best_of or 1
    prompt, tokens = wanted.inputs, None
    if given.truncate is not None:
        prompt = await _truncate(known, prompt, given.truncate, most)
    max_tokens = given.max_new_tokens
    if known is not None and (tokens := await known.encode(prompt)) is not None and most:
        check_length(given, len(tokens), most)
        # Left open, the length is what the model leaves; its tokens have log probabilities here.
        bound = services.settings.max_logprobs // (best_of * ((given.top_n_tokens or 0) + 1))
        max_tokens = max_tokens or max(1, min(most - len(tokens), bound))
    generation = Generation(
        inputs=wanted.inputs,
        given=given,
        is_sampling=is_sampling(wanted.parameters),
        format=known,
        max_tokens=max_tokens,
        prompt_ids=tokens.ids if tokens else (),
    )
    sampling = to_sampling(
        generation,
        choose_seed(given, idempotency_key(request)),
        with_tokens=is_stream or bool(given.details) or best_of > 1,
    )
    # With a seed of the service's choice each text is a sample of its own.
    is_repeatable = given.seed is not None or not generation.is_sampling
    options = SendOptions(
        parameters=sampling, reuse=_wants_reuse(request, wanted) if is_repeatable else False
    )
    return generation, GroupRequest(model.full_name, [Prompt(content=prompt)], options, n=best_of)


def _wants_reuse(request: Request, wanted: GenerateRequest) -> bool | None:
    """The member, or else the header; None if there is neither. Raises InvalidRequestError."""
    header = request.headers.get("x-reuse")
    given = None if header is None else header.strip().lower()
    if given not in (None, "true", "false"):
        raise invalid_field("X-Reuse", "must be `true` or `false`")
    if wanted.reuse is not None or given is None:
        return wanted.reuse
    return given == "true"


async def _encode(model: Model, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
    tokens = None
    if model.format is not None:
        await charge(_TOKEN_COPIES * len(text))
        tokens = await model.format.encode(text, add_special_tokens=add_special_tokens)
    if tokens is None:
        raise NotFoundError(f"The tokenizer of {model.name} is not available")
    return tokens


def _stream_json(pieces: Iterable[bytes]) -> Response:
    """JSON that may be fifty times as large as its request."""

    async def frames() -> AsyncGenerator[bytes, None]:
        for piece in pieces:
            yield piece

    return EventStreamResponse(frames(), media_type=JSON)


async def _truncate(known: PromptFormat | None, text: str, keep: int, most: int | None) -> str:
    """The end of a prompt with at most `keep` tokens, including those around it.

    The engine takes text, not tokens: a cut text may be tokenized differently, so it is counted again. At
    least one token of the prompt is kept.
    """
    if keep <= 0 or (most is not None and keep >= most):
        below = "" if most is None else f" and less than {most}"
        raise InvalidRequestError(f"`truncate` must be strictly positive{below}. Given: {keep}")
    bare = await known.encode(text, add_special_tokens=False) if known is not None else None
    if known is None or bare is None:
        raise InvalidRequestError(
            "`truncate` is not supported: the tokenizer of the model is not available"
        )
    kept, excess = len(bare), (await known.count_tokens(text) or 0) - keep
    cut = text
    while excess > 0 and kept > 1:
        kept = max(1, kept - excess)
        cut = text[bare.starts[len(bare) - kept] :]
        excess = (await known.count_tokens(cut) or 0) - keep
    return cut
