"""From a valid request to a committed row of the queue.

A request with an idempotency key is looked up first: sent before, it is answered with the result
of the first sending. Two that arrive at one moment are both prepared; the statement that stores
them decides, and the one it refuses is looked up again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from app.api.container import Services
from app.auth.principal import Principal
from app.core.errors import IdempotencyConflictError, InternalError, NotFoundError, ServiceError
from app.core.ids import new_id
from app.queue.enqueue import NewResult
from app.queue.idempotency import NewKey, hash_request
from app.results.preparation import (
    GroupRequest,
    Prepared,
    erased,
    erased_context,
    no_chat,
    prepare,
    prepare_group,
    prepare_retry,
    prepare_saved,
)
from app.results.requests import ResultCreate, SendOptions
from app.results.rows import ResultRow


@dataclass(slots=True, frozen=True)
class Accepted:
    """A result that is committed, and whether its model is ready to run it."""

    result: NewResult
    model_ready: bool


@dataclass(slots=True, frozen=True)
class Replayed:
    """A result that the same request had before, under its idempotency key, as it is now."""

    row: ResultRow


SubmissionOutcome = Accepted | Replayed


@dataclass(slots=True, frozen=True)
class PendingSubmission:
    """A request, with its key if it may have been sent before."""

    prepare: Callable[[], Awaitable[Prepared]]
    key: NewKey | None


async def submit_context(
    services: Services,
    principal: Principal,
    model_name: str,
    context_id: UUID,
    options: SendOptions,
    result_id: UUID,
) -> SubmissionOutcome:
    """Send a saved context to a model; returns once the result is committed, as `result_id`.

    Raises UnknownModelError, NotFoundError, InvalidRequestError, QueueFullError,
    IdempotencyConflictError.
    """
    if options.idempotency_key is None:  # nothing to look up: the hot path
        prepared = await prepare_saved(
            services, principal, model_name, context_id, options, result_id
        )
        return _only(await _commit(services, [prepared]))
    request = {"model": model_name, "context_id": str(context_id)} | _members(options)
    key = services.keys.new(options.idempotency_key, hash_request(request))
    asked = PendingSubmission(
        lambda: prepare_saved(services, principal, model_name, context_id, options, result_id), key
    )
    return _only(await _submit(services, principal, [asked]))


async def submit(
    services: Services, principal: Principal, create: ResultCreate, result_id: UUID
) -> SubmissionOutcome:
    """Save a prompt, unless it is saved already, and send it, in one commit. Raises as above."""
    if create.idempotency_key is None:
        prepared = await prepare(services, principal, create, result_id)
        return _only(await _commit(services, [prepared]))
    asked = _to_asked(services, principal, create, result_id)
    return _only(await _submit(services, principal, [asked]))


async def submit_all(
    services: Services, principal: Principal, creates: Sequence[ResultCreate | ServiceError]
) -> list[SubmissionOutcome | ServiceError]:
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
) -> SubmissionOutcome:
    """Send the request of a terminal result once more, as a new result, `result_id`.

    Raises ConflictError while the first is pending; else as above.
    """
    new_key = services.keys.new(key, hash_request({"retry_of": str(retry_of)})) if key else None
    asked = PendingSubmission(
        lambda: prepare_retry(services, principal, retry_of, result_id), new_key
    )
    return _only(await _submit(services, principal, [asked]))


async def submit_attribution(
    services: Services,
    principal: Principal,
    prepared: Callable[[], Awaitable[Prepared]],
    key: NewKey,
    version: int | None,
) -> SubmissionOutcome:
    """Send a text's attribution, or find the one under its key.

    With a `version` the key is of a cache: an attribution that failed, or of another version of the
    index, is no answer. Raises as above, and UnknownIndexError, IndexUnavailableError.
    """
    if version is not None:
        await services.keys.forget_unless_good(principal.team_id, key.key, version)
    return _only(await _submit(services, principal, [PendingSubmission(prepared, key)]))


async def submit_group(
    services: Services, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
) -> list[SubmissionOutcome]:
    """Send the results of one request in one commit, as `ids`; all of them or none.

    Its key is the first result's. Raises ModelNotReadyError, of a request that does not wait for its
    model; else as above.
    """
    key = _key_of_group(services, request)
    if key is not None:
        known = await _replay_group(services, principal.team_id, key, request.size)
        if known is not None:
            return known
    prepared = await prepare_group(services, principal, request, ids)
    results = [item.result for item in prepared]
    if key is not None:
        results = [replace(result, goes_with_key=True) for result in results]
        results[0] = replace(results[0], key=key)
    async with services.admission.admitted(results):
        stored = await services.queue.enqueue(results)
    if all(stored):
        return [
            Accepted(result, item.model.ready)
            for result, item in zip(results, prepared, strict=True)
        ]
    if key is None:
        raise InternalError(f"Result {ids[0]} was not stored, and nothing tells why.")
    # The key was another's; should it be free again by now, it is ours.
    return await submit_group(services, principal, request, ids)


async def _replay_group(
    services: Services, team_id: str, key: NewKey, size: int
) -> list[SubmissionOutcome] | None:
    """The results that the same request had before, under its key; None while the key is free.

    Raises IdempotencyConflictError, also where some of them were deleted, and ErasedError.
    """
    first = await _replay(services, team_id, key)
    if first is None:
        return None
    if isinstance(first, ServiceError):
        raise first
    assert isinstance(first, Replayed)
    if size == 1:
        return [first]
    rows = await services.results.group(team_id, first.row.id)
    if len(rows) != size:
        raise IdempotencyConflictError(
            f"Of the {size} results under this idempotency key {size - len(rows)} were deleted. "
            "Take a new key.",
            extra={"result_id": str(first.row.id)},
        )
    for row in rows:
        if row.erased_at is not None:
            raise erased(row)
    return [Replayed(row) for row in rows]


async def submit_once(
    services: Services, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
) -> None:
    """Send a group that may have been sent before under these very ids, which stay as they are.

    Raises as above.
    """
    prepared = await prepare_group(services, principal, request, ids)
    context_ids = {item.result.context_id: item.result.id for item in reversed(prepared)}
    results = [_in_context(item.result, context_ids[item.result.context_id]) for item in prepared]
    async with services.admission.admitted(results):
        await services.queue.enqueue(results)


def _in_context(result: NewResult, context_id: UUID) -> NewResult:
    """The result in its new context under an id that every sending gives it."""
    assert result.new_context is not None
    context = replace(result.new_context, id=context_id)
    return replace(result, context_id=context_id, new_context=context)


def _key_of_group(services: Services, request: GroupRequest) -> NewKey | None:
    key = request.options.idempotency_key
    if key is None:
        return None
    content = {
        "model": request.model,
        "prompts": [
            [one.content, one.messages, dict(one.template_arguments)] for one in request.prompts
        ],
        "n": request.n,
        # Not what is in there: it has ids of its own each time.
        "is_response": request.request is not None,
        "is_background": request.waits_for_model,
        "store": request.store,
    }
    return services.keys.new(key, hash_request(content | _members(request.options)))


def _to_asked(
    services: Services, principal: Principal, create: ResultCreate, result_id: UUID
) -> PendingSubmission:
    key = None
    if create.idempotency_key is not None:
        key = services.keys.new(create.idempotency_key, hash_request(_members(create)))
    return PendingSubmission(lambda: prepare(services, principal, create, result_id), key)


def _members(options: SendOptions) -> dict[str, Any]:
    """What a request asks for; a default that is written out says nothing."""
    return options.model_dump(mode="json", exclude={"idempotency_key"}, exclude_defaults=True)


def _only(answers: list[SubmissionOutcome | ServiceError]) -> SubmissionOutcome:
    (answer,) = answers
    if isinstance(answer, ServiceError):
        raise answer
    return answer


async def _submit(
    services: Services, principal: Principal, asked: Sequence[PendingSubmission | ServiceError]
) -> list[SubmissionOutcome | ServiceError]:
    known = await _replay_all(services, principal.team_id, asked)
    prepared: list[Prepared | SubmissionOutcome | ServiceError] = []
    for place, item in enumerate(asked):
        if isinstance(item, ServiceError):
            prepared.append(item)
        else:
            prepared.append(known.get(place) or await _try_prepare(item))
    return await _commit(services, prepared)


async def _replay_all(
    services: Services, team_id: str, asked: Sequence[PendingSubmission | ServiceError]
) -> dict[int, SubmissionOutcome | ServiceError]:
    """The answers to those requests, by their place, whose key is taken already."""
    keys = {
        place: item.key
        for place, item in enumerate(asked)
        if isinstance(item, PendingSubmission) and item.key is not None
    }
    if not keys:
        return {}
    answers = await asyncio.gather(*(_replay(services, team_id, key) for key in keys.values()))
    return {place: answer for place, answer in zip(keys, answers, strict=True) if answer}


async def _replay(
    services: Services, team_id: str, key: NewKey
) -> SubmissionOutcome | ServiceError | None:
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
    return erased(row) if row.erased_at is not None else Replayed(row)


async def _try_prepare(asked: PendingSubmission) -> Prepared | ServiceError:
    try:
        prepared = await asked.prepare()
    except ServiceError as error:
        return error
    if asked.key is None:
        return prepared
    return Prepared(prepared.model, replace(prepared.result, key=asked.key))


async def _commit(
    services: Services, prepared: Sequence[Prepared | SubmissionOutcome | ServiceError]
) -> list[SubmissionOutcome | ServiceError]:
    new = [item for item in prepared if isinstance(item, Prepared)]
    stored: Sequence[bool] = []
    if new:
        async with services.admission.admitted([item.result for item in new]):
            stored = await services.queue.enqueue([item.result for item in new])
    refused = [item for item, is_stored in zip(new, stored, strict=True) if not is_stored]
    reasons: Sequence[SubmissionOutcome | ServiceError] = []
    if refused:
        reasons = await asyncio.gather(*(_why_not_stored(services, item) for item in refused))
    are_stored, why_not = iter(stored), iter(reasons)
    answers: list[SubmissionOutcome | ServiceError] = []
    for item in prepared:
        if not isinstance(item, Prepared):
            answers.append(item)
        elif next(are_stored):
            answers.append(Accepted(item.result, item.model.ready))
        else:
            answers.append(next(why_not))
    return answers


async def _why_not_stored(
    services: Services, prepared: Prepared
) -> SubmissionOutcome | ServiceError:
    """The queue takes no row whose key is another's, nor one whose source is missing, or whose
    context is missing, is erased, or holds messages nobody rendered.
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
        if context.erased_at is not None:
            return erased_context(context)
        if result.source_id is not None:
            try:
                await services.results.get(result.team_id, result.source_id)
            except NotFoundError as error:
                return error
        if result.key is None or (context.messages is not None and result.prompt is None):
            return no_chat(prepared.model)
    if result.key is None:
        raise InternalError(f"Result {result.id} was not stored, and nothing tells why.")
    # The key was another's and is free again: its result was deleted, or it expired just now.
    (answer,) = await _commit(services, [prepared])
    return answer
