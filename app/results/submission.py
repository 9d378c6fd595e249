"""From a valid request to a committed row of the queue.

A request with an idempotency key is looked up first: a repetition gets the result of the first
sending. Two that arrive at the same moment are both prepared; the statement that stores them
decides, and the refused one is looked up again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import UUID

from app.auth.principal import Principal
from app.core import byte_budget
from app.core.errors import (
    BudgetExhaustedError,
    ErasedError,
    InternalError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    QueueFullError,
    ServiceError,
)
from app.core.fair_share import in_turns
from app.core.ids import new_id
from app.queue.admission import Admission
from app.queue.enqueue import NewResult
from app.queue.idempotency import IdempotencyKeys, NewKey, hash_request
from app.queue.job_queue import JobQueue
from app.queue.job_rows import JobRow
from app.results.attributions import AttributionDraft
from app.results.contexts import ContextStore, erased_context
from app.results.drafts import GroupRequest, no_chat
from app.results.jobs.store import JobStore
from app.results.preparation import Preparation, Prepared
from app.results.replays import Replayed, ReplayedRow, Replays
from app.results.requests import ResultCreate, SendOptions
from app.results.reuse import Reused, read_reused
from app.results.store import ResultStore

_Options = TypeVar("_Options", bound=SendOptions)


@dataclass(slots=True, frozen=True)
class Accepted:
    """A committed result, and whether its model is ready to run it."""

    result: NewResult
    model_ready: bool

    @property
    def result_id(self) -> UUID:
        return self.result.id


SubmissionOutcome = Accepted | Replayed | Reused
ItemOutcome = SubmissionOutcome | ReplayedRow | ServiceError  # of one of many
_Outcomes = list[ItemOutcome]


@dataclass(slots=True, frozen=True)
class PendingSubmission:
    """A request, with its key if it may be a repetition."""

    prepare: Callable[[], Awaitable[Prepared]]
    key: NewKey | JobRow | None


@dataclass(slots=True, frozen=True)
class Submissions:
    """Accepts requests: looks their keys up, prepares, admits and stores them.

    Every method returns once its results are committed, and raises what `Preparation` raises,
    QueueFullError, LimitError, BudgetExhaustedError and IdempotencyConflictError.
    """

    preparation: Preparation
    contexts: ContextStore
    results: ResultStore
    jobs: JobStore
    keys: IdempotencyKeys
    replays: Replays
    admission: Admission
    queue: JobQueue

    async def submit_context(
        self,
        principal: Principal,
        model_name: str,
        context_id: UUID,
        options: SendOptions,
        result_id: UUID,
    ) -> SubmissionOutcome:
        key = self.replays.key(options, model=model_name, context_id=str(context_id))
        options = await self._in_its_job(principal, options)
        return await self._submit_one(
            principal.team_id,
            lambda: self.preparation.saved(principal, model_name, context_id, options, result_id),
            key,
        )

    async def submit(
        self, principal: Principal, create: ResultCreate, result_id: UUID
    ) -> SubmissionOutcome:
        key = self.replays.key(create)
        create = await self._in_its_job(principal, create)
        return await self._submit_one(
            principal.team_id,
            lambda: self.preparation.prompt(principal, create, result_id),
            key,
        )

    async def submit_all(
        self, principal: Principal, creates: Sequence[ResultCreate | ServiceError]
    ) -> _Outcomes:
        """Send many in one commit; a refused item has its error in its place."""
        ids = {one.job_id for one in creates if isinstance(one, ResultCreate) and one.job_id}
        jobs = await self.jobs.defaults(principal.team_id, list(ids)) if ids else {}

        def pending(create: ResultCreate) -> PendingSubmission | ServiceError:
            key = self.replays.key(create)
            if create.job_id is not None:
                job = jobs[create.job_id]
                if isinstance(job, ServiceError):
                    return job
                create = job.completed(create, principal.max_priority)
            return PendingSubmission(
                lambda: self.preparation.prompt(principal, create, new_id()), key
            )

        return await self._submit(
            principal.team_id,
            [item if isinstance(item, ServiceError) else pending(item) for item in creates],
        )

    async def _in_its_job(self, principal: Principal, options: _Options) -> _Options:
        """The options with the defaults of the job, if it has one. Raises NotFoundError."""
        if options.job_id is None:
            return options
        (job,) = (await self.jobs.defaults(principal.team_id, [options.job_id])).values()
        if isinstance(job, ServiceError):
            raise job
        return job.completed(options, principal.max_priority)

    async def retry(
        self, principal: Principal, retry_of: UUID, key: str | None, result_id: UUID
    ) -> SubmissionOutcome:
        return await self._submit_one(
            principal.team_id,
            lambda: self.preparation.retry(principal, retry_of, result_id),
            self.keys.new(key, hash_request({"retry_of": str(retry_of)})) if key else None,
        )

    async def submit_attribution(
        self, principal: Principal, draft: AttributionDraft, key: NewKey, version: int | None
    ) -> SubmissionOutcome:
        """Send it, or find it by its key; failed or of another `version`, it is sent again."""
        if version is not None:
            await self.keys.forget_unless_good(principal.team_id, key.key, version)
        return await self._submit_one(
            principal.team_id, lambda: self.preparation.attribution(principal, draft), key
        )

    async def submit_group(
        self, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
    ) -> Sequence[SubmissionOutcome]:
        """Send all or none, in one commit. Raises ModelNotReadyError too."""
        key = self.replays.group_key(request)
        if key is not None:
            known = await self.replays.find_group(principal.team_id, key, request.size)
            if known is not None:
                return known
        prepared = await self.preparation.group(principal, request, ids)
        results = [item.result for item in prepared]
        if key is not None:
            results = [replace(result, goes_with_key=True) for result in results]
            results[0] = replace(results[0], key=key)
        if all(await self.store(results)):
            return [
                Accepted(result, item.model.ready)
                for result, item in zip(results, prepared, strict=True)
            ]
        if key is None:
            raise _unexplained(ids[0])
        # Another request took the key meanwhile, or it has become free again.
        return await self.submit_group(principal, request, ids)

    async def submit_group_once(
        self, principal: Principal, request: GroupRequest, ids: Sequence[UUID]
    ) -> None:
        """Send a group; results stored under its ids stay. Raises ModelNotReadyError too."""
        prepared = await self.preparation.group(principal, request, ids)
        context_ids = {item.result.context_id: item.result.id for item in reversed(prepared)}
        await self.store(
            [_in_context(item.result, context_ids[item.result.context_id]) for item in prepared]
        )

    async def _submit_one(
        self, team_id: str, prepare: Callable[[], Awaitable[Prepared]], key: NewKey | JobRow | None
    ) -> SubmissionOutcome:
        if key is None:  # the hot path: nothing to look up
            (outcome,) = await self._commit([await prepare()])
        else:
            (outcome,) = await self._submit(team_id, [PendingSubmission(prepare, key)])
        if isinstance(outcome, ServiceError):
            raise outcome
        if isinstance(outcome, ReplayedRow):
            return await self.replays.read(team_id, outcome)
        return outcome

    async def _submit(
        self, team_id: str, requests: Sequence[PendingSubmission | ServiceError]
    ) -> _Outcomes:
        outcomes = await self._replay_all(team_id, requests)
        prepared: dict[int, Prepared] = {}
        async for place, request in in_turns(enumerate(requests)):
            if isinstance(request, ServiceError):
                outcomes[place] = request
            elif place not in outcomes:
                try:
                    new = await request.prepare()
                except ServiceError as error:
                    outcomes[place] = error
                else:
                    prepared[place] = Prepared(new.model, _under(request.key, new.result))
        committed = await self._commit(list(prepared.values()))
        outcomes |= zip(prepared, committed, strict=True)
        return [outcomes[place] for place in range(len(requests))]

    async def _replay_all(
        self, team_id: str, requests: Sequence[PendingSubmission | ServiceError]
    ) -> dict[int, ItemOutcome]:
        keys = {
            place: request.key
            for place, request in enumerate(requests)
            if isinstance(request, PendingSubmission) and request.key is not None
        }
        found = await asyncio.gather(*(self.replays.find(team_id, key) for key in keys.values()))
        return {place: known for place, known in zip(keys, found, strict=True) if known}

    async def store(self, results: Sequence[NewResult]) -> Sequence[bool]:
        """Admit and commit results; which are stored. Raises QueueFullError and LimitError."""
        async with self.admission.admitted(results):
            stored = await self.queue.enqueue(results)
        byte_budget.shrink()
        return stored

    async def _commit(self, prepared: Sequence[Prepared]) -> _Outcomes:
        if not prepared:
            return []
        results = [item.result for item in prepared]
        try:
            stored = await self.store(results)
        except (QueueFullError, LimitError, BudgetExhaustedError):
            # Rows of a job that takes none are refused for good, not until a limit allows them.
            refusals = await self._refusals_of_jobs(results)
            if not all(one.job is not None and refusals[one.job.job_id] for one in results):
                raise
            stored = [False] * len(results)
        else:
            if all(stored):
                return await self._all_accepted(prepared)
            refusals = await self._refusals_of_jobs(
                [one for one, is_stored in zip(results, stored, strict=True) if not is_stored]
            )
        return await asyncio.gather(
            *(self._outcome(*item, refusals) for item in zip(prepared, stored, strict=True))
        )

    async def _refusals_of_jobs(
        self, results: Sequence[NewResult]
    ) -> dict[UUID, ServiceError | None]:
        """The reasons why the jobs of these results take no new row; None for a job that does."""
        jobs = {(one.team_id, one.job.job_id) for one in results if one.job is not None}
        return {job_id: await self.jobs.refusal(team_id, job_id) for team_id, job_id in jobs}

    async def _outcome(
        self, item: Prepared, is_stored: bool, refusals: Mapping[UUID, ServiceError | None]
    ) -> ItemOutcome:
        """The outcome of a result after the statement that stores it.

        The queue refuses a row whose key is taken, and one whose source or context is missing or
        erased, or holds messages that are not rendered.
        """
        result = item.result
        if is_stored:
            return await self._accepted(item)
        key = result.key or result.job
        if key is not None:
            known = await self.replays.find(result.team_id, key)
            if known is not None:
                return known
        if result.job is not None and (refusal := refusals[result.job.job_id]) is not None:
            return refusal
        if result.new_context is None:
            try:
                await self._check_sources(item, is_keyed=key is not None)
            except (NotFoundError, ErasedError, InvalidRequestError) as error:
                return error
        if key is None:
            raise _unexplained(result.id)
        # The key is free again: its result was deleted, or it expired just now.
        (outcome,) = await self._commit([item])
        return outcome

    async def _all_accepted(self, prepared: Sequence[Prepared]) -> _Outcomes:
        if all(item.result.reuse_digest is None for item in prepared):
            return [Accepted(item.result, item.model.ready) for item in prepared]
        return await asyncio.gather(*map(self._accepted, prepared))

    async def _accepted(self, item: Prepared) -> SubmissionOutcome:
        reused = await read_reused(self.results, item.result)
        return reused or Accepted(item.result, item.model.ready)

    async def _check_sources(self, item: Prepared, *, is_keyed: bool) -> None:
        """Raise NotFoundError, ErasedError, InvalidRequestError for the context or the source."""
        result = item.result
        context = await self.contexts.get(result.team_id, result.context_id)
        if context.erased_at is not None:
            raise erased_context(context)
        if result.source_id is not None:
            await self.results.get(result.team_id, result.source_id)
        if not is_keyed or (context.messages is not None and result.prompt is None):
            raise no_chat(item.model)


def _under(key: NewKey | JobRow | None, result: NewResult) -> NewResult:
    if key is None:
        return result
    return replace(result, job=key) if isinstance(key, JobRow) else replace(result, key=key)


def _in_context(result: NewResult, context_id: UUID) -> NewResult:
    assert result.new_context is not None
    context = replace(result.new_context, id=context_id)
    return replace(result, context_id=context_id, new_context=context)


def _unexplained(result_id: UUID) -> InternalError:
    return InternalError(f"Result {result_id} was not stored, for no known reason.")
