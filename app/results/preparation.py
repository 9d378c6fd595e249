"""From a valid request to a result that can be stored: model, prompt, length, deadline, limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import orjson

from app.api.container import Services
from app.auth.principal import Principal
from app.core.errors import (
    ConflictError,
    ErasedError,
    FieldError,
    InvalidRequestError,
    ModelNotReadyError,
)
from app.core.ids import new_id
from app.core.queue_names import queue_of
from app.core.url_guard import url_fault
from app.inference.model_registry import Model
from app.queue.continuation import can_continue
from app.queue.enqueue import NewContext, NewResult, OnDisconnect
from app.results.attributions import following, new_attribution, renewed
from app.results.contexts import Context
from app.results.requests import AttributeOptions, ContextCreate, ResultCreate, SendOptions
from app.results.rows import ResultRow, SubmittedRequest

# A tokenizer makes at most one token of a byte, and adds a few special ones.
_SPECIAL_TOKENS = 8


@dataclass(slots=True, frozen=True)
class Prompt:
    """A new prompt: text, or messages with what the model's template takes beside them."""

    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class GroupRequest:
    """One request for several results: `n` choices of each prompt, in this order.

    A seed is that of the first choice; each further one has the next.
    """

    model: str
    prompts: Sequence[Prompt]
    options: SendOptions = field(default_factory=SendOptions)
    n: int = 1
    on_disconnect: OnDisconnect = "cancel"
    request: str | None = None  # what its dialect answers with later, as JSON text
    store: bool = True  # or its texts are erased once they are delivered
    waits_for_model: bool = False  # or it is refused while its model is not ready

    @property
    def size(self) -> int:
        """How many results it has."""
        return len(self.prompts) * self.n


@dataclass(slots=True, frozen=True)
class Prepared:
    """A result to store, and the model it is for."""

    model: Model
    result: NewResult


def to_new_context(team_id: str, create: ContextCreate | ResultCreate) -> NewContext:
    """The row of a new context."""
    return NewContext(
        id=new_id(),
        team_id=team_id,
        content=create.content,
        messages=None if create.messages is None else _json(_plain_messages(create.messages)),
        metadata=_json(create.metadata) if isinstance(create, ContextCreate) else "{}",
    )


def erased(row: ResultRow | SubmittedRequest) -> ErasedError:
    """Why a result cannot be told again, or used."""
    return ErasedError(
        f"Result {row.id} was sent with `store` false: its texts were erased at "
        f"{row.erased_at:%Y-%m-%dT%H:%M:%SZ}."
    )


def erased_context(context: Context) -> ErasedError:
    """Why a context cannot be sent."""
    assert context.erased_at is not None
    return ErasedError(
        f"The text of context {context.id} was erased at {context.erased_at:%Y-%m-%dT%H:%M:%SZ}: it "
        "was sent with `store` false, or prompts are not kept for longer."
    )


async def prepare(
    services: Services, principal: Principal, create: ResultCreate, result_id: UUID
) -> Prepared:
    """A new prompt, or a saved one, and how it is sent. Raises UnknownModelError, NotFoundError,
    InvalidRequestError, as do the others.
    """
    if create.context_id is not None:
        return await prepare_saved(
            services, principal, create.model, create.context_id, create, result_id
        )
    model = await services.registry.find(create.model)
    messages = _plain_messages(create.messages) if create.messages is not None else None
    prompt = await _render(model, messages) if messages is not None else None
    text = prompt if prompt is not None else create.content or ""
    context = to_new_context(principal.team_id, create)
    return await _new_result(
        services, model, result_id, context.id, principal, prompt, text, create, context
    )


async def prepare_saved(
    services: Services,
    principal: Principal,
    model_name: str,
    context_id: UUID,
    options: SendOptions,
    result_id: UUID,
) -> Prepared:
    """A saved prompt, to be sent to a model. Raises ErasedError too."""
    model = await services.registry.find(model_name)
    prompt, text = None, ""
    limits = await services.admission.limits_of(principal.team_id, model.name)
    # Else there is nothing to render with, and nothing to be counted.
    if model.format is not None or limits.tokens_per_minute is not None:
        context = await services.contexts.get(principal.team_id, context_id)
        if context.erased_at is not None:
            raise erased_context(context)
        if context.messages is not None:
            prompt = await _render(model, context.messages)
        text = prompt if prompt is not None else context.content or ""
    return await _new_result(
        services, model, result_id, context_id, principal, prompt, text, options, None
    )


async def prepare_retry(
    services: Services, principal: Principal, retry_of: UUID, result_id: UUID
) -> Prepared:
    """The request of an ended result once more. Raises ConflictError, ErasedError too."""
    row = await services.results.request(principal.team_id, retry_of)
    if row.state == "pending":
        raise ConflictError("The result is pending. Wait for its end, or cancel it first.")
    if row.erased_at is not None:
        raise erased(row)
    is_generation = row.kind == "generation"
    if is_generation:
        model = await services.registry.find(row.model_name)
    else:
        model = services.registry.serving(row.model_name)
    limits = await services.admission.limits_of(principal.team_id, model.name)
    tokens = orjson.loads(row.parameters)["max_tokens"] if is_generation else 0
    if is_generation and limits.tokens_per_minute is not None:
        text = row.prompt
        if text is None:
            text = (await services.contexts.get(principal.team_id, row.context_id)).content or ""
        tokens += await _count_tokens(model, text)
    result = NewResult(
        id=result_id,
        team_id=principal.team_id,
        context_id=row.context_id,
        model_name=model.name,
        model_version=model.version,
        prompt=row.prompt,
        parameters=row.parameters,
        priority=min(row.priority, principal.max_priority),
        deadline_seconds=row.deadline_seconds or services.settings.default_deadline_seconds,
        metadata=row.metadata,
        webhook_url=row.webhook_url,
        retry_of=retry_of,
        kind=row.kind,
        source_id=row.source_id,
        attribution=renewed(row.attribution) if row.attribution else None,
        store=row.store,
        retain_seconds=row.retain_seconds,
        tokens=tokens,
        limits=limits,
        resumable=row.resumable and services.settings.continue_lost_attempts,
    )
    return Prepared(model, result)


async def prepare_group(
    services: Services, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
) -> list[Prepared]:
    """The results of one request, as `ids`. Raises ModelNotReadyError too."""
    model = await services.registry.find(request.model)
    if not model.ready and not request.waits_for_model:
        raise ModelNotReadyError(
            f"Model {model.name} is known, but not ready: {model.reason}. Try again later, or send "
            "to /results/, where it waits.",
            headers={"Retry-After": "5"},
        )
    prepared: list[Prepared] = []
    for prompt in request.prompts:
        first = await _prepare_prompt(services, principal, model, prompt, request.options)
        prepared += [Prepared(model, _choice(first.result, place)) for place in range(request.n)]
    group_id = ids[0] if request.size > 1 else None
    return [
        Prepared(
            model,
            replace(
                item.result,
                id=result_id,
                group_id=group_id,
                on_disconnect=request.on_disconnect,
                request=request.request,
                store=request.store,
            ),
        )
        for item, result_id in zip(prepared, ids, strict=True)
    ]


def _choice(first: NewResult, place: int) -> NewResult:
    """A further choice of the same prompt; its context is the first one's."""
    parameters = orjson.loads(first.parameters)
    if place == 0 or parameters.get("seed") is None:
        return first
    return replace(first, parameters=_json(parameters | {"seed": parameters["seed"] + place}))


async def _prepare_prompt(
    services: Services, principal: Principal, model: Model, prompt: Prompt, options: SendOptions
) -> Prepared:
    rendered = None
    if prompt.messages is not None:
        rendered = await _render(model, prompt.messages, prompt.template_arguments)
    context = NewContext(
        id=new_id(),
        team_id=principal.team_id,
        content=prompt.content,
        messages=None if prompt.messages is None else _json(prompt.messages),
        metadata="{}",
    )
    text = rendered if rendered is not None else prompt.content or ""
    return await _new_result(
        services, model, new_id(), context.id, principal, rendered, text, options, context
    )


async def _new_result(
    services: Services,
    model: Model,
    result_id: UUID,
    context_id: UUID,
    principal: Principal,
    prompt: str | None,
    text: str,
    options: SendOptions,
    new_context: NewContext | None,
) -> Prepared:
    settings = services.settings
    deadline = options.deadline_seconds or settings.default_deadline_seconds
    if deadline > settings.max_deadline_seconds:
        raise _invalid(
            "deadline_seconds",
            f"must be at most {settings.max_deadline_seconds:.0f} (LLM_MAX_DEADLINE_SECONDS)",
        )
    if options.priority > principal.max_priority:
        raise _invalid(
            "priority", f"must be at most {principal.max_priority}, the token's max_priority"
        )
    if options.webhook_url is not None:
        wrong = url_fault(options.webhook_url, allow_private=settings.webhook_allow_private)
        if wrong:
            raise _invalid("webhook_url", wrong)
    if options.retain_seconds is not None:
        most = (await services.retention.of(principal.team_id)).results_seconds
        if most is not None and options.retain_seconds > most:
            raise _invalid("retain_seconds", f"must be at most {most:.0f}, as your team's results")
    parameters = options.parameters
    max_tokens = await _max_tokens(model, text, parameters.max_tokens, settings.default_max_tokens)
    limits = await services.admission.limits_of(principal.team_id, model.name)
    tokens = max_tokens
    if limits.tokens_per_minute is not None:
        tokens += await _count_tokens(model, text)
    if (parameters.min_tokens or 0) > max_tokens:
        raise _invalid(
            "parameters.min_tokens",
            f"{parameters.min_tokens} exceeds max_tokens, which is {max_tokens} unless it is given",
        )
    stored = parameters.to_stored(max_tokens)
    result = NewResult(
        id=result_id,
        team_id=principal.team_id,
        context_id=context_id,
        model_name=model.name,
        model_version=model.version,
        prompt=prompt,
        parameters=_json(stored),
        priority=options.priority,
        deadline_seconds=deadline,
        metadata=_json(options.metadata) if options.metadata else "{}",
        new_context=new_context,
        webhook_url=options.webhook_url,
        attribution=_following(services, options.attribute, deadline),
        retain_seconds=options.retain_seconds,
        tokens=tokens,
        limits=limits,
        resumable=settings.continue_lost_attempts
        and options.continue_lost_attempts is not False
        and can_continue(stored),
    )
    return Prepared(model, result)


def _following(
    services: Services, wanted: AttributeOptions | None, deadline_seconds: float
) -> str | None:
    """The attribution that is to follow. Raises UnknownIndexError, IndexUnavailableError."""
    if wanted is None:
        return None
    services.indexes.engine(wanted.index)
    return following(wanted.index, wanted.to_stored(), deadline_seconds)


async def prepare_attribution(
    services: Services,
    principal: Principal,
    index: str,
    text: str,
    parameters: Mapping[str, Any],
    result_id: UUID,
    **members: Any,
) -> Prepared:
    """A text to attribute; of a result's, `members` tell its source and context.

    Raises UnknownIndexError, IndexUnavailableError.
    """
    services.indexes.engine(index)
    queue = queue_of(index)
    result = new_attribution(
        result_id,
        principal.team_id,
        index,
        text,
        parameters,
        **{"deadline_seconds": services.settings.default_deadline_seconds} | members,
        limits=await services.admission.limits_of(principal.team_id, queue),
    )
    return Prepared(services.registry.serving(queue), result)


async def _count_tokens(model: Model, text: str) -> int:
    """Tokens of a prompt; a quarter of its bytes where nothing tells them."""
    counted = await model.format.count_tokens(text) if model.format else None
    return math.ceil(len(text.encode()) / 4) if counted is None else counted


async def _render(
    model: Model, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
) -> str:
    if model.format is None or not model.has_chat:
        raise no_chat(model)
    return model.format.for_engine(await model.format.render(messages, arguments))


async def _max_tokens(model: Model, text: str, asked: int | None, default: int) -> int:
    """The number of tokens to generate; refuses what does not fit the model's length."""
    length = model.max_model_len
    if length is None or model.format is None:
        return asked or default
    if len(text.encode()) + _SPECIAL_TOKENS + (asked or default) <= length:
        return asked or default
    prompt_tokens = await model.format.count_tokens(text)
    if prompt_tokens is None:
        return asked or min(default, length)
    if prompt_tokens >= length:
        raise _invalid(
            "content",
            f"the prompt has {prompt_tokens} tokens; {model.name} takes {length} in all",
            max_model_len=length,
        )
    if asked is not None and prompt_tokens + asked > length:
        raise _invalid(
            "parameters.max_tokens",
            f"{asked} and a prompt of {prompt_tokens} tokens exceed the {length} tokens of "
            f"{model.name}; at most {length - prompt_tokens} are left",
            max_model_len=length,
        )
    return asked or min(default, length - prompt_tokens)


def no_chat(model: Model) -> InvalidRequestError:
    return _invalid(
        "messages",
        f"model {model.name} has no chat template in the model repository; send `content`",
    )


def _invalid(field: str, message: str, **extra: object) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}.", [FieldError(field, message)], extra=extra)


def _plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
