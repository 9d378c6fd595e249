"""From a valid request to a committed row of the queue: key, model, prompt, length, deadline.

A request with an idempotency key is looked up first: sent before, it is answered with the result
of the first sending. Two that arrive at one moment are both prepared; the statement that stores
them decides, and the one it refuses is looked up again.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import orjson

from app.errors import (
    ConflictError,
    ErasedError,
    FieldError,
    IdempotencyConflictError,
    InvalidRequestError,
    ModelNotReadyError,
    NotFoundError,
    ServiceError,
)
from app.idempotency import NewKey, hash_request
from app.ids import new_id
from app.job_queue import NewContext, NewResult, OnDisconnect
from app.model_registry import Model
from app.principal import Principal
from app.schemas.native import ContextCreate, ResultCreate, SendOptions
from app.services import Services
from app.webhook_target import url_fault

# A tokenizer makes at most one token of a byte, and adds a few special ones.
_SPECIAL_TOKENS = 8


@dataclass(slots=True, frozen=True)
class Accepted:
    """A result that is committed, and whether its model is ready to run it."""

    result: NewResult
    model_ready: bool


@dataclass(slots=True, frozen=True)
class Replayed:
    """A result that the same request had before, under its idempotency key, as it is now."""

    row: asyncpg.Record


Answer = Accepted | Replayed


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
class _Prepared:
    model: Model
    result: NewResult


@dataclass(slots=True, frozen=True)
class _Asked:
    """A request, with its key if it may have been sent before."""

    prepare: Callable[[], Awaitable[_Prepared]]
    key: NewKey | None


def to_new_context(team_id: str, create: ContextCreate | ResultCreate) -> NewContext:
    """The row of a new context."""
    return NewContext(
        id=new_id(),
        team_id=team_id,
        content=create.content,
        messages=None if create.messages is None else _json(_plain_messages(create.messages)),
        metadata=_json(create.metadata) if isinstance(create, ContextCreate) else "{}",
    )


async def submit_context(
    services: Services,
    principal: Principal,
    model_name: str,
    context_id: UUID,
    options: SendOptions,
    result_id: UUID,
) -> Answer:
    """Send a saved context to a model; returns once the result is committed, as `result_id`.

    Raises UnknownModelError, NotFoundError, InvalidRequestError, QueueFullError,
    IdempotencyConflictError.
    """
    if options.idempotency_key is None:  # nothing to look up: the hot path
        prepared = await _prepare_saved(
            services, principal, model_name, context_id, options, result_id
        )
        return _only(await _commit(services, [prepared]))
    request = {"model": model_name, "context_id": str(context_id)} | _members(options)
    key = services.keys.new(options.idempotency_key, hash_request(request))
    asked = _Asked(
        lambda: _prepare_saved(services, principal, model_name, context_id, options, result_id), key
    )
    return _only(await _submit(services, principal, [asked]))


async def submit(
    services: Services, principal: Principal, create: ResultCreate, result_id: UUID
) -> Answer:
    """Save a prompt, unless it is saved already, and send it, in one commit. Raises as above."""
    if create.idempotency_key is None:
        prepared = await _prepare(services, principal, create, result_id)
        return _only(await _commit(services, [prepared]))
    asked = _to_asked(services, principal, create, result_id)
    return _only(await _submit(services, principal, [asked]))


async def submit_all(
    services: Services, principal: Principal, creates: Sequence[ResultCreate | ServiceError]
) -> list[Answer | ServiceError]:
    """Send many in one commit; an item that cannot be accepted has its error in its place."""
    asked = [
        create
        if isinstance(create, ServiceError)
        else _to_asked(services, principal, create, new_id())
        for create in creates
    ]
    return await _submit(services, principal, asked)


async def retry(
    services: Services, principal: Principal, retry_of: UUID, key: str | None, result_id: UUID
) -> Answer:
    """Send the request of a terminal result once more, as a new result, `result_id`.

    Raises ConflictError while the first is pending; else as above.
    """
    new_key = services.keys.new(key, hash_request({"retry_of": str(retry_of)})) if key else None
    asked = _Asked(lambda: _prepare_retry(services, principal, retry_of, result_id), new_key)
    return _only(await _submit(services, principal, [asked]))


async def submit_group(
    services: Services, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
) -> list[Answer]:
    """Send the results of one request in one commit, as `ids`; all of them or none.

    Raises ModelNotReadyError, of a request that does not wait for its model; else as above.
    """
    prepared = await _prepare_group(services, principal, request, ids)
    asked = [
        _Asked(partial(_immediately, item), _key_in_group(services, request, place))
        for place, item in enumerate(prepared)
    ]
    answers = await _submit(services, principal, asked)
    refused = next((answer for answer in answers if isinstance(answer, ServiceError)), None)
    if refused is not None:
        raise refused
    return [answer for answer in answers if not isinstance(answer, ServiceError)]


async def submit_once(
    services: Services, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
) -> None:
    """Send a group that may have been sent before under these very ids, which stay as they are.

    Raises as above.
    """
    prepared = await _prepare_group(services, principal, request, ids)
    context_ids = {item.result.context_id: item.result.id for item in reversed(prepared)}
    results = [_in_context(item.result, context_ids[item.result.context_id]) for item in prepared]
    async with services.admission.admitted(results):
        await services.queue.enqueue(results)


def _in_context(result: NewResult, context_id: UUID) -> NewResult:
    """The result in its new context under an id that every sending gives it."""
    assert result.new_context is not None
    context = replace(result.new_context, id=context_id)
    return replace(result, context_id=context_id, new_context=context)


async def _prepare_group(
    services: Services, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
) -> list[_Prepared]:
    model = await services.registry.find(request.model)
    if not model.ready and not request.waits_for_model:
        raise ModelNotReadyError(
            f"Model {model.name} is known, but not ready: {model.reason}. Try again later, or send "
            "to /results/, where it waits.",
            headers={"Retry-After": "5"},
        )
    prepared: list[_Prepared] = []
    for prompt in request.prompts:
        first = await _prepare_prompt(services, principal, model, prompt, request.options)
        prepared += [_Prepared(model, _choice(first.result, place)) for place in range(request.n)]
    group_id = ids[0] if request.size > 1 else None
    return [
        _Prepared(
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


def _key_in_group(services: Services, request: GroupRequest, place: int) -> NewKey | None:
    """The key of one result of a group. The results take theirs together, or none does.

    The group's own key cannot be told from another's: keys hold no control characters.
    """
    key = request.options.idempotency_key
    if key is None:
        return None
    content = {
        "model": request.model,
        "prompts": [
            [one.content, one.messages, dict(one.template_arguments)] for one in request.prompts
        ],
        "n": request.n,
    }
    name = key if request.size == 1 else f"{key}\x1f{place}"
    return services.keys.new(name, hash_request(content | _members(request.options)))


async def _immediately(prepared: _Prepared) -> _Prepared:
    return prepared


def _to_asked(
    services: Services, principal: Principal, create: ResultCreate, result_id: UUID
) -> _Asked:
    key = None
    if create.idempotency_key is not None:
        key = services.keys.new(create.idempotency_key, hash_request(_members(create)))
    return _Asked(lambda: _prepare(services, principal, create, result_id), key)


def _members(options: SendOptions) -> dict[str, Any]:
    """What a request asks for; a default that is written out says nothing."""
    return options.model_dump(mode="json", exclude={"idempotency_key"}, exclude_defaults=True)


def _only(answers: list[Answer | ServiceError]) -> Answer:
    (answer,) = answers
    if isinstance(answer, ServiceError):
        raise answer
    return answer


async def _submit(
    services: Services, principal: Principal, asked: Sequence[_Asked | ServiceError]
) -> list[Answer | ServiceError]:
    known = await _replay_all(services, principal.team_id, asked)
    prepared: list[_Prepared | Answer | ServiceError] = []
    for place, item in enumerate(asked):
        if isinstance(item, ServiceError):
            prepared.append(item)
        else:
            prepared.append(known.get(place) or await _try_prepare(item))
    return await _commit(services, prepared)


async def _replay_all(
    services: Services, team_id: str, asked: Sequence[_Asked | ServiceError]
) -> dict[int, Answer | ServiceError]:
    """The answers to those requests, by their place, whose key is taken already."""
    keys = {
        place: item.key
        for place, item in enumerate(asked)
        if isinstance(item, _Asked) and item.key is not None
    }
    if not keys:
        return {}
    answers = await asyncio.gather(*(_replay(services, team_id, key) for key in keys.values()))
    return {place: answer for place, answer in zip(keys, answers, strict=True) if answer}


async def _replay(services: Services, team_id: str, key: NewKey) -> Answer | ServiceError | None:
    """What the key was used for: the result of the same request, or the conflict with another."""
    taken = await services.keys.find(team_id, key.key)
    if taken is None:
        return None
    if taken.request_hash != key.request_hash:
        return IdempotencyConflictError(
            f"Result {taken.result_id} was made under this idempotency key, by another request. "
            "Repeat that one unchanged, or take a new key.",
            extra={"result_id": str(taken.result_id)},
        )
    try:
        row = await services.results.get(team_id, taken.result_id)
    except NotFoundError:
        return None  # deleted since we looked, and the key with it
    return erased(row) if row["erased_at"] is not None else Replayed(row)


def erased(row: asyncpg.Record) -> ErasedError:
    """Why a result cannot be told again, or used."""
    return ErasedError(
        f"Result {row['id']} was sent with `store` false: its texts were erased at "
        f"{row['erased_at']:%Y-%m-%dT%H:%M:%SZ}."
    )


async def _try_prepare(asked: _Asked) -> _Prepared | ServiceError:
    try:
        prepared = await asked.prepare()
    except ServiceError as error:
        return error
    if asked.key is None:
        return prepared
    return _Prepared(prepared.model, replace(prepared.result, key=asked.key))


async def _commit(
    services: Services, prepared: Sequence[_Prepared | Answer | ServiceError]
) -> list[Answer | ServiceError]:
    new = [item for item in prepared if isinstance(item, _Prepared)]
    stored: Sequence[bool] = []
    if new:
        async with services.admission.admitted([item.result for item in new]):
            stored = await services.queue.enqueue([item.result for item in new])
    refused = [item for item, is_stored in zip(new, stored, strict=True) if not is_stored]
    reasons: Sequence[Answer | ServiceError] = []
    if refused:
        reasons = await asyncio.gather(*(_why_not_stored(services, item) for item in refused))
    are_stored, why_not = iter(stored), iter(reasons)
    answers: list[Answer | ServiceError] = []
    for item in prepared:
        if not isinstance(item, _Prepared):
            answers.append(item)
        elif next(are_stored):
            answers.append(Accepted(item.result, item.model.ready))
        else:
            answers.append(next(why_not))
    return answers


async def _why_not_stored(services: Services, prepared: _Prepared) -> Answer | ServiceError:
    """The queue takes no row whose key is another's, nor one whose context is missing, or holds
    messages nobody rendered.
    """
    result = prepared.result
    if result.key is not None:
        known = await _replay(services, result.team_id, result.key)
        if known is not None:
            return known
    if result.new_context is None:
        try:
            context = await services.contexts.get(result.team_id, result.context_id)
        except NotFoundError as error:
            return error
        if result.key is None or (context.messages is not None and result.prompt is None):
            return _no_chat(prepared.model)
    # The key was another's and is free again: its result was deleted, or it expired just now.
    (answer,) = await _commit(services, [prepared])
    return answer


async def _prepare(
    services: Services, principal: Principal, create: ResultCreate, result_id: UUID
) -> _Prepared:
    if create.context_id is not None:
        return await _prepare_saved(
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


async def _prepare_prompt(
    services: Services, principal: Principal, model: Model, prompt: Prompt, options: SendOptions
) -> _Prepared:
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


async def _prepare_saved(
    services: Services,
    principal: Principal,
    model_name: str,
    context_id: UUID,
    options: SendOptions,
    result_id: UUID,
) -> _Prepared:
    model = await services.registry.find(model_name)
    prompt, text = None, ""
    if model.format is not None:  # else there is nothing to render with, or to count by
        context = await services.contexts.get(principal.team_id, context_id)
        if context.messages is not None:
            prompt = await _render(model, context.messages)
        text = prompt if prompt is not None else context.content or ""
    return await _new_result(
        services, model, result_id, context_id, principal, prompt, text, options, None
    )


async def _prepare_retry(
    services: Services, principal: Principal, retry_of: UUID, result_id: UUID
) -> _Prepared:
    row = await services.results.request(principal.team_id, retry_of)
    if row["state"] == "pending":
        raise ConflictError("The result is pending. Wait for its end, or cancel it first.")
    if row["erased_at"] is not None:
        raise erased(row)
    model = await services.registry.find(row["model_name"])
    result = NewResult(
        id=result_id,
        team_id=principal.team_id,
        context_id=row["context_id"],
        model_name=model.name,
        model_version=model.version,
        prompt=row["prompt"],
        parameters=row["parameters"],
        priority=row["priority"],
        deadline_seconds=row["deadline_seconds"] or services.settings.default_deadline_seconds,
        metadata=row["metadata"],
        webhook_url=row["webhook_url"],
        retry_of=retry_of,
        store=row["store"],
        tokens=orjson.loads(row["parameters"])["max_tokens"],
        limits=services.admission.limits_of(principal.team_id, model.name),
    )
    return _Prepared(model, result)


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
) -> _Prepared:
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
    parameters = options.parameters
    max_tokens = await _max_tokens(model, text, parameters.max_tokens, settings.default_max_tokens)
    limits = services.admission.limits_of(principal.team_id, model.name)
    tokens = max_tokens
    if limits.tokens_per_minute is not None:
        tokens += await _count_tokens(model, text)
    if (parameters.min_tokens or 0) > max_tokens:
        raise _invalid(
            "parameters.min_tokens",
            f"{parameters.min_tokens} exceeds max_tokens, which is {max_tokens} unless it is given",
        )
    result = NewResult(
        id=result_id,
        team_id=principal.team_id,
        context_id=context_id,
        model_name=model.name,
        model_version=model.version,
        prompt=prompt,
        parameters=_json(parameters.to_stored(max_tokens)),
        priority=options.priority,
        deadline_seconds=deadline,
        metadata=_json(options.metadata) if options.metadata else "{}",
        new_context=new_context,
        webhook_url=options.webhook_url,
        tokens=tokens,
        limits=limits,
    )
    return _Prepared(model, result)


async def _count_tokens(model: Model, text: str) -> int:
    """Tokens of a prompt; a quarter of its bytes where nothing tells them."""
    counted = await model.format.count_tokens(text) if model.format else None
    return math.ceil(len(text.encode()) / 4) if counted is None else counted


async def _render(
    model: Model, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
) -> str:
    if model.format is None or not model.has_chat:
        raise _no_chat(model)
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


def _no_chat(model: Model) -> InvalidRequestError:
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
