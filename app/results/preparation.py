"""From a valid request to a result that can be stored: model, prompt, length, deadline, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from uuid import UUID

import orjson

from app.auth.principal import Principal
from app.core.byte_budget import release
from app.core.errors import ConflictError, ModelNotReadyError
from app.core.fair_share import in_turns
from app.core.ids import new_id
from app.core.queue_names import queue_of
from app.core.settings import Settings
from app.inference.model_registry import Model, ModelRegistry
from app.infini_gram.indexes import Indexes
from app.queue.admission import Admission
from app.queue.continuation import can_continue
from app.queue.enqueue import NewContext, NewResult
from app.queue.result_size import count_logprobs, expected_bytes
from app.queue.team_limits import Limits
from app.results.attributions import AttributionDraft, following, renewed
from app.results.contexts import ContextStore, erased_context, plain_messages
from app.results.drafts import (
    GroupRequest,
    Prompt,
    SubmissionDraft,
    check_logprobs,
    check_prompts,
    no_chat,
    to_json,
    validate,
)
from app.results.plain_contexts import TextSize
from app.results.requests import ResultCreate, SendOptions
from app.results.retention.policy import RetentionPolicy
from app.results.rows import erased
from app.results.store import ResultStore
from app.results.token_budget import count_tokens, fits, generated_tokens


@dataclass(slots=True, frozen=True)
class Prepared:
    model: Model
    result: NewResult
    logprobs: int = 0  # how many log probabilities it may have


@dataclass(slots=True, frozen=True)
class Preparation:
    """Prepares results of all kinds of requests.

    Every method raises UnknownModelError, NotFoundError, InvalidRequestError, ErasedError,
    UnknownIndexError and IndexUnavailableError.
    """

    settings: Settings
    registry: ModelRegistry
    indexes: Indexes
    contexts: ContextStore
    results: ResultStore
    retention: RetentionPolicy
    admission: Admission
    api_process: UUID

    async def prompt(self, principal: Principal, create: ResultCreate, result_id: UUID) -> Prepared:
        if create.context_id is not None:
            return await self.saved(principal, create.model, create.context_id, create, result_id)
        model = await self.registry.find(create.model)
        messages = plain_messages(create.messages) if create.messages is not None else None
        prompt = Prompt(create.content, messages)
        prepared = await self._new_prompt(principal, model, prompt, create, result_id)
        return self._bounded(prepared)

    async def saved(
        self,
        principal: Principal,
        model_name: str,
        context_id: UUID,
        options: SendOptions,
        result_id: UUID,
    ) -> Prepared:
        model = await self.registry.find(model_name)
        content = prompt = None
        charge = 0
        limits = await self.admission.limits_of(principal.team_id, model.name)
        size = self._known_size(principal.team_id, model, context_id, options, limits)
        # Otherwise there is neither a template to render it with nor a limit to count it for.
        is_read = model.format is not None or limits.tokens_per_minute is not None
        if is_read and size is None:
            context, charge = await self.contexts.get_charged(principal.team_id, context_id)
            if context.erased_at is not None:
                raise erased_context(context)
            content = context.content
            if context.messages is not None:
                prompt = await _render(model, context.messages)
        draft = SubmissionDraft(
            result_id, model, context_id, content, prompt, options, stored_size=size
        )
        prepared = self._bounded(await self._finish(principal, draft))
        if prompt is None:  # the text was only counted
            release(charge)
        return prepared

    def _known_size(
        self, team_id: str, model: Model, context_id: UUID, options: SendOptions, limits: Limits
    ) -> TextSize | None:
        """Return the size of a plain context whose text the request does not need."""
        if limits.tokens_per_minute is not None:
            return None
        size = self.contexts.plain.size(team_id, context_id)
        max_tokens = options.parameters.max_tokens or self.settings.default_max_tokens
        return size if size and fits(model, size.bytes, max_tokens) else None

    async def group(
        self, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
    ) -> list[Prepared]:
        """The results of one request, as `ids`. Raises ModelNotReadyError too."""
        model = await self.registry.find(request.model)
        if not model.ready and not request.waits_for_model:
            raise ModelNotReadyError(
                f"Model {model.name} is known, but not ready: {model.reason}. Try again later, or "
                "send to /results/, where it waits.",
                headers={"Retry-After": "5"},
            )
        group_id = ids[0] if request.size > 1 else None
        waiter_id = self.api_process if request.on_disconnect == "cancel" else None
        prepared = []
        remaining = iter(ids)
        async for prompt in in_turns(request.prompts):
            first = await self._new_prompt(principal, model, prompt, request.options, new_id())
            for place, result_id in enumerate(islice(remaining, request.n)):
                result = replace(
                    first.result,
                    id=result_id,
                    parameters=_of_choice(first.result.parameters, place),
                    group_id=group_id,
                    on_disconnect=request.on_disconnect,
                    waiter_id=waiter_id,
                    request=request.request,
                    store=request.store,
                )
                prepared.append(replace(first, result=result))
        check_prompts([one.result for one in prepared])
        check_logprobs(sum(one.logprobs for one in prepared), self.settings.max_logprobs)
        return prepared

    async def retry(self, principal: Principal, retry_of: UUID, result_id: UUID) -> Prepared:
        """The request of a terminal result again. Raises ConflictError while it is pending."""
        row = await self.results.request(principal.team_id, retry_of)
        if row.state == "pending":
            raise ConflictError("The result is pending. Wait for its end, or cancel it first.")
        if row.erased_at is not None:
            raise erased(row)
        is_generation = row.kind == "generation"
        if is_generation:
            model = await self.registry.find(row.model_name)
        else:
            model = self.registry.serving(row.model_name)
        limits = await self.admission.limits_of(principal.team_id, model.name)
        parameters = orjson.loads(row.parameters)
        tokens = parameters["max_tokens"] if is_generation else 0
        if is_generation and limits.tokens_per_minute is not None:
            text = row.prompt
            if text is None:
                text = (await self.contexts.get(principal.team_id, row.context_id)).content or ""
            tokens += await count_tokens(model, text)
        result = NewResult(
            id=result_id,
            team_id=principal.team_id,
            context_id=row.context_id,
            model_name=model.name,
            model_version=model.version,
            prompt=row.prompt,
            parameters=row.parameters,
            priority=min(row.priority, principal.max_priority),
            deadline_seconds=row.deadline_seconds or self.settings.default_deadline_seconds,
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
            resumable=row.resumable and self.settings.continue_lost_attempts,
            expected_bytes=expected_bytes(len(row.prompt or ""), parameters),
        )
        return self._bounded(Prepared(model, result, count_logprobs(parameters)))

    async def attribution(self, principal: Principal, draft: AttributionDraft) -> Prepared:
        self.indexes.engine(draft.index)
        queue = queue_of(draft.index)
        limits = await self.admission.limits_of(principal.team_id, queue)
        result = draft.to_result(principal.team_id, self.settings.default_deadline_seconds, limits)
        return Prepared(self.registry.serving(queue), result)

    def _bounded(self, prepared: Prepared) -> Prepared:
        check_logprobs(prepared.logprobs, self.settings.max_logprobs)
        return prepared

    async def _new_prompt(
        self,
        principal: Principal,
        model: Model,
        prompt: Prompt,
        options: SendOptions,
        result_id: UUID,
    ) -> Prepared:
        rendered = messages = None
        if prompt.messages is not None:
            rendered = await _render(model, prompt.messages, prompt.template_arguments)
            messages = to_json(prompt.messages)
        context = NewContext(new_id(), principal.team_id, prompt.content, messages, "{}")
        return await self._finish(
            principal,
            SubmissionDraft(
                result_id, model, context.id, prompt.content, rendered, options, context
            ),
        )

    async def _finish(self, principal: Principal, draft: SubmissionDraft) -> Prepared:
        max_retain = None
        if draft.options.retain_seconds is not None:
            max_retain = (await self.retention.of(principal.team_id)).results_seconds
        validate(
            draft.options,
            self.settings,
            max_priority=principal.max_priority,
            max_retain_seconds=max_retain,
        )
        max_tokens = await generated_tokens(draft, self.settings.default_max_tokens)
        limits = await self.admission.limits_of(principal.team_id, draft.model.name)
        tokens = max_tokens
        if limits.tokens_per_minute is not None:
            tokens += await count_tokens(draft.model, draft.text)
        parameters = draft.options.parameters.to_stored(max_tokens)
        result = self._to_result(principal.team_id, draft, parameters, tokens, limits)
        return Prepared(draft.model, result, count_logprobs(parameters))

    def _to_result(
        self,
        team_id: str,
        draft: SubmissionDraft,
        parameters: Mapping[str, Any],
        tokens: int,
        limits: Limits,
    ) -> NewResult:
        options = draft.options
        deadline = options.deadline_seconds or self.settings.default_deadline_seconds
        attribution = None
        if (wanted := options.attribute) is not None:
            self.indexes.engine(wanted.index)
            attribution = following(wanted.index, wanted.to_stored(), deadline)
        return NewResult(
            id=draft.id,
            team_id=team_id,
            context_id=draft.context_id,
            model_name=draft.model.name,
            model_version=draft.model.version,
            prompt=draft.prompt,
            parameters=to_json(parameters),
            priority=options.priority,
            deadline_seconds=deadline,
            metadata=to_json(options.metadata) if options.metadata else "{}",
            new_context=draft.new_context,
            webhook_url=options.webhook_url,
            attribution=attribution,
            retain_seconds=options.retain_seconds,
            tokens=tokens,
            limits=limits,
            resumable=self.settings.continue_lost_attempts
            and options.continue_lost_attempts is not False
            and can_continue(parameters),
            expected_bytes=expected_bytes(draft.size.characters, parameters),
        )


def _of_choice(parameters: str, place: int) -> str:
    members = orjson.loads(parameters) if place else {}
    if members.get("seed") is None:
        return parameters
    return to_json(members | {"seed": members["seed"] + place})


async def _render(
    model: Model, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
) -> str:
    if model.format is None or not model.has_chat:
        raise no_chat(model)
    return model.format.for_engine(await model.format.render(messages, arguments))
