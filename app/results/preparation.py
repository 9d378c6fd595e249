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
from app.inference.adapters import ADAPTER_PARAMETER, full_name
from app.inference.images import IMAGES
from app.inference.model_registry import Model, ModelRegistry
from app.infini_gram.indexes import Indexes
from app.queue.admission import Admission
from app.queue.continuation import can_continue
from app.queue.enqueue import NewContext, NewResult
from app.queue.result_size import count_logprobs, count_prompt_logprobs, expected_bytes
from app.queue.team_limits import Limits
from app.results.attributions import AttributionDraft, following, renewed
from app.results.contexts import ContextStore, erased_context, plain_messages
from app.results.drafts import (
    GroupRequest,
    Prompt,
    SubmissionDraft,
    check_logprobs,
    check_prompts,
    generation_parameters,
    to_json,
    validate,
)
from app.results.image_urls import ImageUrls
from app.results.plain_contexts import TextSize
from app.results.pooling import kind_of, pooling_parameters, render_prompt, wrong_task
from app.results.rendering import measure_images
from app.results.requests import ResultCreate, SendOptions
from app.results.retention.policy import RetentionPolicy
from app.results.reuse import may_reuse, text_of, with_digest
from app.results.rows import erased
from app.results.store import ResultStore
from app.results.token_budget import (
    fits,
    generated_tokens,
    needs_text,
    prompt_tokens,
    retried_tokens,
    scored_tokens,
)


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
    images: ImageUrls

    async def prompt(self, principal: Principal, create: ResultCreate, result_id: UUID) -> Prepared:
        if create.context_id is not None:
            return await self.saved(principal, create.model, create.context_id, create, result_id)
        model = await self.registry.find(create.model, principal.team_id)
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
        model = await self.registry.find(model_name, principal.team_id)
        content = prompt = images = None
        charge = 0
        limits = await self.admission.limits_of(principal.team_id, model.name)
        size = self._known_size(principal.team_id, model, context_id, options, limits)
        # Otherwise there is neither a template to render it with nor a limit to count it for.
        is_read = model.format is not None or needs_text(options, limits)
        if is_read and size is None:
            context, charge = await self.contexts.get_charged(principal.team_id, context_id)
            if context.erased_at is not None:
                raise erased_context(context)
            content = context.content
            if context.messages is not None:
                prompt = await render_prompt(model, options, context.messages)
                images = await measure_images(model, context.messages)
        draft = SubmissionDraft(
            *(result_id, model, context_id, content, prompt, options),
            stored_size=size,
            images=images,
        )
        prepared = self._bounded(await self._finish(principal, draft))
        if prompt is None:  # the text was only counted
            release(charge)
        return prepared

    def _known_size(
        self, team_id: str, model: Model, context_id: UUID, options: SendOptions, limits: Limits
    ) -> TextSize | None:
        """Return the size of a plain context whose text the request does not need."""
        if needs_text(options, limits):
            return None
        size = self.contexts.plain.size(team_id, context_id)
        max_tokens = options.parameters.max_tokens or self.settings.default_max_tokens
        return size if size and fits(model, size.bytes, max_tokens) else None

    async def group(
        self, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
    ) -> list[Prepared]:
        """The results of one request, as `ids`. Raises ModelNotReadyError too."""
        model = await self.registry.find(request.model, principal.team_id)
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
            first = await self._new_prompt(
                principal,
                model,
                prompt,
                request.options,
                new_id(),
                cuts_max_tokens=request.cuts_max_tokens,
            )
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
                if first.result.reuse_digest is not None and place:  # its seed is its own
                    result = with_digest(result, model, text_of(result))
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
        is_of_model = row.kind != "attribution"
        parameters = orjson.loads(row.parameters)
        if is_of_model:
            name = full_name(row.model_name, parameters.get(ADAPTER_PARAMETER))
            model = await self.registry.find(name, principal.team_id)
        else:
            model = self.registry.serving(row.model_name)
        limits = await self.admission.limits_of(principal.team_id, model.name)
        tokens = parameters.get("max_tokens", 0) if is_of_model else 0
        logprobs = count_logprobs(parameters)
        is_scored = parameters.get("prompt_logprobs") is not None
        if is_of_model and (limits.tokens_per_minute is not None or is_scored):
            text = row.prompt
            if text is None:
                text = (await self.contexts.get(principal.team_id, row.context_id)).content or ""
            of_prompt, scored = await retried_tokens(model, text, parameters)
            tokens, logprobs = tokens + of_prompt, logprobs + scored
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
            token_id=principal.token_id,
            expected_bytes=expected_bytes(len(row.prompt or ""), parameters),
            has_images=IMAGES in parameters,
        )
        return self._bounded(Prepared(model, result, logprobs))

    async def attribution(self, principal: Principal, draft: AttributionDraft) -> Prepared:
        self.indexes.engine(draft.index)
        queue = queue_of(draft.index)
        limits = await self.admission.limits_of(principal.team_id, queue)
        result = draft.to_result(principal, self.settings.default_deadline_seconds, limits)
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
        *,
        cuts_max_tokens: bool = False,
    ) -> Prepared:
        rendered = messages = given = None
        if prompt.messages is not None:
            arguments = prompt.template_arguments
            rendered = await render_prompt(model, options, prompt.messages, arguments)
            given = await self.images.fetched(principal.team_id, prompt.messages)
            messages = to_json(given)
        context = NewContext(new_id(), principal.team_id, prompt.content, messages, "{}")
        return await self._finish(
            principal,
            SubmissionDraft(
                result_id,
                model,
                context.id,
                prompt.content,
                rendered,
                options,
                context,
                cuts_max_tokens=cuts_max_tokens,
                token_ids=prompt.token_ids,
                images=await measure_images(model, given),
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
        if (error := wrong_task(draft.model, draft.options)) is not None:
            raise error
        max_tokens = 0
        if draft.options.pooling is None:
            max_tokens = await generated_tokens(draft, self.settings.default_max_tokens)
        limits = await self.admission.limits_of(principal.team_id, draft.model.name)
        tokens = max_tokens
        if limits.tokens_per_minute is not None:
            tokens += await prompt_tokens(draft)
        if draft.options.pooling is not None:
            parameters = await pooling_parameters(draft)
            return Prepared(
                draft.model, self._to_result(principal, draft, parameters, tokens, limits)
            )
        parameters = generation_parameters(draft, max_tokens, self.settings.max_images)
        logprobs = count_logprobs(parameters)
        if "prompt_logprobs" in parameters:
            logprobs += count_prompt_logprobs(parameters, await scored_tokens(draft))
        result = self._to_result(principal, draft, parameters, tokens, limits)
        if may_reuse(draft.options, limits):
            result = with_digest(result, draft.model, draft.text)
        return Prepared(draft.model, result, logprobs)

    def _to_result(
        self,
        principal: Principal,
        draft: SubmissionDraft,
        parameters: Mapping[str, Any],
        tokens: int,
        limits: Limits,
    ) -> NewResult:
        options = draft.options
        deadline = options.deadline_seconds or self.settings.default_deadline_seconds
        attribution, form = None, draft.model.format
        if (wanted := options.attribute) is not None:
            self.indexes.engine(wanted.index)
            attribution = following(wanted.index, wanted.to_stored(), deadline)
        return NewResult(
            id=draft.id,
            team_id=principal.team_id,
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
            kind=kind_of(options),
            attribution=attribution,
            retain_seconds=options.retain_seconds,
            tokens=tokens,
            limits=limits,
            resumable=self.settings.continue_lost_attempts
            and options.continue_lost_attempts is not False
            and can_continue(parameters, form.default_parameters if form else None),
            expected_bytes=expected_bytes(draft.size.characters, parameters),
            token_id=principal.token_id,
            has_images=IMAGES in parameters,
        )


def _of_choice(parameters: str, place: int) -> str:
    members = orjson.loads(parameters) if place else {}
    if members.get("seed") is None:
        return parameters
    return to_json(members | {"seed": members["seed"] + place})
