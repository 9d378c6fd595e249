"""From a valid request to a committed row of the queue: model, prompt, length, limits, deadline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson

from app.errors import FieldError, InvalidRequestError, NotFoundError, ServiceError
from app.ids import new_id
from app.job_queue import NewContext, NewResult
from app.model_registry import Model
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
class _Prepared:
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


async def submit_context(
    services: Services, team_id: str, model_name: str, context_id: UUID, options: SendOptions
) -> Accepted:
    """Send a saved context to a model; returns once the result is committed.

    Raises UnknownModelError, NotFoundError, InvalidRequestError, QueueFullError.
    """
    prepared = await _prepare_saved(services, team_id, model_name, context_id, options)
    return _only(await _commit(services, [prepared]))


async def submit(services: Services, team_id: str, create: ResultCreate) -> Accepted:
    """Save a prompt, unless it is saved already, and send it, in one commit. Raises as above."""
    return _only(await _commit(services, [await _prepare(services, team_id, create)]))


async def submit_all(
    services: Services, team_id: str, creates: Sequence[ResultCreate | ServiceError]
) -> list[Accepted | ServiceError]:
    """Send many in one commit; an item that cannot be accepted has its error in its place."""
    prepared: list[_Prepared | ServiceError] = []
    for create in creates:
        try:
            if isinstance(create, ServiceError):
                raise create
            prepared.append(await _prepare(services, team_id, create))
        except ServiceError as error:
            prepared.append(error)
    return await _commit(services, prepared)


def _only(answers: list[Accepted | ServiceError]) -> Accepted:
    (answer,) = answers
    if isinstance(answer, ServiceError):
        raise answer
    return answer


async def _commit(
    services: Services, prepared: Sequence[_Prepared | ServiceError]
) -> list[Accepted | ServiceError]:
    results = [item.result for item in prepared if isinstance(item, _Prepared)]
    stored: Iterator[bool] = iter([])
    if results:
        await services.depth.admit(len(results))
        stored = iter(await services.queue.enqueue(results))
    answers: list[Accepted | ServiceError] = []
    for item in prepared:
        if isinstance(item, ServiceError):
            answers.append(item)
        elif next(stored):
            answers.append(Accepted(item.result, item.model.ready))
        else:
            answers.append(await _why_not_stored(services, item))
    return answers


async def _why_not_stored(services: Services, prepared: _Prepared) -> ServiceError:
    """The queue takes no row whose context is missing, or holds messages nobody rendered."""
    try:
        await services.contexts.get(prepared.result.team_id, prepared.result.context_id)
    except NotFoundError as error:
        return error
    return _no_chat(prepared.model)


async def _prepare(services: Services, team_id: str, create: ResultCreate) -> _Prepared:
    if create.context_id is not None:
        return await _prepare_saved(services, team_id, create.model, create.context_id, create)
    model = await services.registry.find(create.model)
    messages = _plain_messages(create.messages) if create.messages is not None else None
    prompt = await _render(model, messages) if messages is not None else None
    text = prompt if prompt is not None else create.content or ""
    context = to_new_context(team_id, create)
    return await _new_result(services, model, context.id, team_id, prompt, text, create, context)


async def _prepare_saved(
    services: Services, team_id: str, model_name: str, context_id: UUID, options: SendOptions
) -> _Prepared:
    model = await services.registry.find(model_name)
    prompt, text = None, ""
    if model.format is not None:  # else there is nothing to render with, or to count by
        context = await services.contexts.get(team_id, context_id)
        if context.messages is not None:
            prompt = await _render(model, context.messages)
        text = prompt if prompt is not None else context.content or ""
    return await _new_result(services, model, context_id, team_id, prompt, text, options, None)


async def _new_result(
    services: Services,
    model: Model,
    context_id: UUID,
    team_id: str,
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
    if options.webhook_url is not None:
        wrong = url_fault(options.webhook_url, allow_private=settings.webhook_allow_private)
        if wrong:
            raise _invalid("webhook_url", wrong)
    parameters = options.parameters
    max_tokens = await _max_tokens(model, text, parameters.max_tokens, settings.default_max_tokens)
    if (parameters.min_tokens or 0) > max_tokens:
        raise _invalid(
            "parameters.min_tokens",
            f"{parameters.min_tokens} exceeds max_tokens, which is {max_tokens} unless it is given",
        )
    result = NewResult(
        id=new_id(),
        team_id=team_id,
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
    )
    return _Prepared(model, result)


async def _render(model: Model, messages: list[dict[str, Any]]) -> str:
    if model.format is None or not model.has_chat:
        raise _no_chat(model)
    return await model.format.render(messages)


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
            "content", f"the prompt has {prompt_tokens} tokens; {model.name} takes {length} in all"
        )
    if asked is not None and prompt_tokens + asked > length:
        raise _invalid(
            "parameters.max_tokens",
            f"{asked} and a prompt of {prompt_tokens} tokens exceed the {length} tokens of "
            f"{model.name}; at most {length - prompt_tokens} are left",
        )
    return asked or min(default, length - prompt_tokens)


def _no_chat(model: Model) -> InvalidRequestError:
    return _invalid(
        "messages",
        f"model {model.name} has no chat template in the model repository; send `content`",
    )


def _invalid(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}.", [FieldError(field, message)])


def _plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
