"""The queue: the only file that changes `results.state`, by the statements of `job_queue_sql`.

The result row is the job. Every write names the state, the worker and the attempt it expects, so
a race becomes a row count of zero: somebody else decided, stop, write nothing. All times are the
database's clock. `docs/state_machine.md` draws the transitions.
"""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import compress
from typing import Any, Literal, Protocol
from uuid import UUID

import orjson
from asyncpg import Record

from app.core import log_context, metrics, tracing
from app.core.database import Connection, Database, await_standby
from app.core.errors import Failure
from app.core.group_commit import Batcher
from app.core.listener import join_ids
from app.core.settings import Settings
from app.queue import sql as sql
from app.queue.continuation import Resume, load_resumes
from app.queue.idempotency import NewKey
from app.queue.sql import MAX_BATCH, SUSPECT_DEATHS
from app.queue.team_limits import Limits, RunningLimits, TeamLimits

logger = logging.getLogger(__name__)

_MAX_ENQUEUE = 1000

NO_LIMITS = Limits()

OnDisconnect = Literal["continue", "cancel"]
Kind = Literal["generation", "attribution"]


@dataclass(slots=True, frozen=True)
class NewContext:
    """A prompt to store: plain `content`, or chat `messages` as JSON text; exactly one."""

    id: UUID
    team_id: str
    content: str | None
    messages: str | None
    metadata: str


@dataclass(slots=True, frozen=True)
class NewResult:
    """A validated request to enqueue; JSON members are JSON text."""

    id: UUID
    team_id: str
    context_id: UUID
    model_name: str
    parameters: str
    deadline_seconds: float
    model_version: int | None = None
    prompt: str | None = None
    priority: int = 0
    metadata: str = "{}"
    group_id: UUID | None = None
    retry_of: UUID | None = None
    new_context: NewContext | None = None
    webhook_url: str | None = None
    key: NewKey | None = None
    goes_with_key: bool = False  # the key of its group's first result
    on_disconnect: OnDisconnect = "continue"
    request: str | None = None  # what its dialect answers with later, as JSON text
    store: bool = True  # or its texts are erased once it is delivered
    kind: Kind = "generation"
    source_id: UUID | None = None  # of an attribution: the result whose text it is about
    attribution: str | None = None  # the one that follows its completion, as JSON text
    retain_seconds: float | None = None  # it is kept no longer, from its end on
    tokens: int = 0  # of prompt and answer at most: what it counts for its team's rate
    limits: Limits = NO_LIMITS  # of its team and model
    trace: str | None = None  # the context of its request's trace (`traceparent`)
    resumable: bool = False  # whether the text of a lost attempt may be continued


@dataclass(slots=True, frozen=True)
class Claim:
    """One attempt that this worker may write, as claimed."""

    id: UUID
    attempt: int
    model_name: str
    prompt: str
    parameters: dict[str, Any]
    seconds_left: float
    is_suspect: bool
    has_attribution: bool = False  # one is to follow its completion
    team_id: str = ""
    trace: str | None = None
    resumable: bool = False
    resume: Resume | None = None  # the text of earlier attempts, to be continued


class AttemptOutcome(StrEnum):
    """How an attempt ended, as its worker saw it. The queue decides what becomes of the result."""

    COMPLETED = "completed"
    FAILED = "failed"
    LOST = "lost"  # Triton took the request, then the stream broke: counts as an attempt
    RETURNED = "returned"  # never taken, or handed back at shutdown: counts for nothing


@dataclass(slots=True, frozen=True)
class AttemptEnd:
    """The end of one attempt: its outcome, and what the model said until then."""

    result_id: UUID
    attempt: int
    outcome: AttemptOutcome
    output: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprobs: str | None = None
    model_version: int | None = None
    first_token_seconds: float | None = None
    failure: Failure | None = None
    retry_after_seconds: float = 0.0
    has_attribution: bool = False
    # If the result is requeued: whether its stored text stays. `output` is empty where the attempt
    # leaves it as it found it.
    keeps_text: bool = False
    continued_from: int | None = None  # length of the text that it was to continue
    continued: bool = False  # and the model did


@dataclass(slots=True, frozen=True)
class Chunk:
    """Text of a running attempt, to be kept should its worker die. Offsets are code points."""

    result_id: UUID
    attempt: int
    offset: int
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    logprobs: str | None = None  # of its tokens, as a JSON list
    token_ids: bytes | None = None  # of its tokens, as little-endian INT32


class EagerDispatcher(Protocol):
    """The worker of this process, which runs results from the statement on that stores them."""

    @property
    def worker_id(self) -> UUID:
        """Whose claims they are."""

    def may_start(self, models: Sequence[str]) -> list[bool]:
        """For each result of these models, whether it has a place here now."""

    def begin(self, claims: Sequence[Claim]) -> None:
        """Generate for results that are just being stored, and write nothing of them yet."""

    def settle(self, worker_id: UUID, claims: Sequence[Claim]) -> None:
        """Run what is committed as claimed by `worker_id`; stop what else has begun."""


class ResultWaiters(Protocol):
    """Those who wait in this process for results to end."""

    def awaits(self, result_id: UUID) -> bool:
        """Whether somebody waits for this one."""

    def hand(self, row: Record) -> None:
        """Give them a result that has just ended: what a read of it would give."""


class JobQueue:
    """Enqueue, claim, append, end, cancel, rescue, expire: every transition of a result.

    Where a `birthplace` is set and nothing of a model waits, new results are claimed as they are
    stored: one write less for each, and no way through notification and claim. The model begins
    while the statement is under way.
    """

    def __init__(
        self, database: Database, settings: Settings, limits: TeamLimits | None = None
    ) -> None:
        self._limits = limits or TeamLimits(database, settings)
        self.birthplace: EagerDispatcher | None = None
        self._database = database
        self._settings = settings
        self._enqueues: Batcher[NewResult, bool] = Batcher(
            database,
            self._enqueue,
            max_items=_MAX_ENQUEUE,
            retry_seconds=settings.database_timeout_seconds,
        )

    async def enqueue(self, results: Sequence[NewResult]) -> list[bool]:
        """Commit new results in one statement; False where the context or source does not
        exist, or the idempotency key is another result's.

        Returns only after the commit: an id may be told from then on.
        """
        if tracing.active is not None:
            trace = log_context.trace()
            results = [replace(result, trace=trace) for result in results]
        stored = list(await self._enqueues.submit_all(results))
        is_telling = logger.isEnabledFor(logging.DEBUG)
        for result, is_stored in zip(results, stored, strict=True):
            if is_stored:
                metrics.SUBMISSIONS.of(result.model_name).inc()
                if is_telling:
                    extra = {"action": "accepted", "result_id": str(result.id)}
                    logger.debug("accepted for %s", result.model_name, extra=extra)
        return stored

    async def _enqueue(
        self, connection: Connection, results: Sequence[NewResult], resent: bool
    ) -> list[bool]:
        place = self.birthplace
        worker_id = place.worker_id if place else None
        # In the order of claims: the free places go to the highest priority.
        in_order = sorted(results, key=lambda result: -result.priority)
        models = [result.model_name for result in in_order]
        may_start = place.may_start(models) if place else [False] * len(in_order)
        # How much of a team runs, a claim counts.
        may_start = [
            yes and result.limits.max_running is None
            for yes, result in zip(may_start, in_order, strict=True)
        ]
        keyed = [(result.key, result) for result in in_order if result.key is not None]
        started: list[Claim] = []
        if place and not resent:
            place.begin(
                [_to_first_claim(one) for one in compress(in_order, may_start) if _is_new(one)]
            )
        try:
            row = await connection.fetchrow(
                sql.ENQUEUE_WITH_KEYS if keyed else sql.ENQUEUE,
                *_to_columns(in_order),
                may_start,
                worker_id if any(may_start) else None,
                *(_to_key_columns(keyed) if keyed else ()),
            )
            assert row is not None
            new = {result.id: result for result in results}
            for identifier, prompt in zip(row["started"] or (), row["prompts"] or (), strict=True):
                started.append(_to_first_claim(new[identifier], prompt))
        finally:
            if place and worker_id:
                place.settle(worker_id, started)
        stored = set(row["ids"] or ())
        if resent and len(stored) < len(results):
            # The first sending may have been committed although its answer was lost. What it
            # claimed is handed back by the heartbeat.
            ids = [result.id for result in results]
            stored |= {row["id"] for row in await connection.fetch(sql.ALREADY_ENQUEUED, ids)}
            await await_standby(connection)
        return [result.id in stored for result in results]

    async def claims(
        self, worker_id: UUID, free: Mapping[str, int]
    ) -> AsyncIterator[Sequence[Claim]]:
        """Claim up to `free[model]` results of each model; none once the worker is marked dead.

        What is claimed must be run at once: for a model with running limits other claims of it may
        have to be waited for.

        Not sent again after a lost connection: rows of a claim whose answer was lost show up in
        `owned` and are handed back by the heartbeat.
        """
        limited = {model: found for model in free if (found := self._limits.running(model))}
        open_to_all = {model: count for model, count in free.items() if model not in limited}
        if open_to_all:
            async with self._database.connection() as connection:
                free_for_all = await connection.fetch(
                    sql.CLAIM, worker_id, list(open_to_all), list(open_to_all.values())
                )
                # Before the connection's return, which may take time where it leads nowhere now.
                yield await self._to_claims(connection, free_for_all)
        for model, limits in limited.items():
            yield await self._claim_within_limits(worker_id, model, free[model], limits)

    async def _to_claims(self, connection: Connection, rows: Sequence[Record]) -> list[Claim]:
        """The claims of claimed rows, with the text that they are to continue."""
        is_on = self._settings.continue_lost_attempts
        if is_on:
            resumes = await load_resumes(connection, rows)
        else:
            resumes = {
                row["id"]: Resume(row["text_attempt"], fault="LLM_CONTINUE_LOST_ATTEMPTS is off")
                for row in rows
                if row["text_attempt"] is not None
            }
        return [_to_claim(row, resumes.get(row["id"]), is_resumable=is_on) for row in rows]

    @property
    def has_running_limits(self) -> bool:
        """Whether the end of one result may let another of its team run."""
        return self._limits.has_running

    async def load_limits(self) -> None:
        """Know what teams may use, before anything is claimed."""
        await self._limits.load()

    async def _claim_within_limits(
        self, worker_id: UUID, model: str, free: int, limits: RunningLimits
    ) -> Sequence[Claim]:
        async with self._database.connection() as connection:
            async with connection.transaction():
                await connection.execute(sql.LOCK_QUEUE, model)
                rows = await connection.fetch(
                    sql.CLAIM_WITHIN_LIMITS,
                    worker_id,
                    model,
                    free,
                    limits.default,
                    list(limits.of_teams),
                    list(limits.of_teams.values()),
                )
            return await self._to_claims(connection, rows)

    async def claim_suspects(self, worker_id: UUID, models: Sequence[str]) -> list[Claim]:
        """Claim, for each model on which nothing runs, one result that must run alone."""
        claims = []
        for row in await self._database.fetch(sql.SUSPECT_MODELS, list(models)):
            model = row["model_name"]
            async with self._database.connection() as connection:
                async with connection.transaction():
                    await connection.execute(sql.LOCK_QUEUE, model)
                    claimed = await connection.fetch(sql.CLAIM_SUSPECT, worker_id, model)
                claims += await self._to_claims(connection, claimed)
        return claims

    async def append(
        self, worker_id: UUID, chunks: Sequence[Chunk], watched: Sequence[UUID] = ()
    ) -> None:
        """Keep text of running attempts, and tell who reads the `watched` results elsewhere.

        Chunks of attempts no longer ours are dropped.
        """
        await self._database.run(lambda connection: _append(connection, worker_id, chunks, watched))

    def keeping_lane(self, worker_id: UUID, retry_seconds: float) -> Batcher[Chunk, None]:
        """The lane on which one worker stores the last text of attempts that are to be continued.

        Chunks of attempts no longer ours are dropped.
        """

        async def keep_texts(
            connection: Connection, chunks: Sequence[Chunk], _resent: bool
        ) -> list[None]:
            await _append(connection, worker_id, chunks)
            return [None] * len(chunks)

        return Batcher(self._database, keep_texts, max_items=MAX_BATCH, retry_seconds=retry_seconds)

    def ending_lane(
        self, worker_id: UUID, retry_seconds: float, audience: ResultWaiters | None = None
    ) -> Batcher[AttemptEnd, bool]:
        """The lane on which one worker ends its attempts; False: the attempt was not ours.

        Results for which the `audience` waits are handed to it by the statement that ends them.
        """

        async def end_attempts(
            connection: Connection, ends: Sequence[AttemptEnd], resent: bool
        ) -> list[bool]:
            return await _end_attempts(
                connection, worker_id, ends, resent, self._settings.max_attempts, audience
            )

        return Batcher(
            self._database, end_attempts, max_items=MAX_BATCH, retry_seconds=retry_seconds
        )

    async def owned(self, connection: Connection, worker_id: UUID) -> dict[UUID, tuple[int, bool]]:
        """Pending results of a worker: id -> (attempt, whether cancellation was requested).

        Asked on the heartbeat's own connection: no retry may hold up the next renewal.
        """
        rows = await connection.fetch(sql.STILL_OURS, worker_id)
        return {row["id"]: (row["attempt"], row["is_cancelled"]) for row in rows}

    async def cancel(self, team_id: str, **filters: object) -> int:
        """Cancel a team's pending results by `id`, `context_id` or `model_name`; how many.

        Queued ones are terminal on return; running ones are marked and their worker is told.
        """
        names = ["team_id", *filters]
        where = " AND ".join(f"{name} = ${place}" for place, name in enumerate(names, 1))
        # A second pass finds only rows not yet marked; one `id` needs no pass.
        where += "" if "id" in filters else " AND cancel_requested_at IS NULL"
        statement = sql.CANCEL.format(where=where)
        total: int = 0
        while True:
            row = await self._database.fetchrow(statement, team_id, *filters.values())
            assert row is not None
            total += row["cancelled"]
            if row["cancelled"] < MAX_BATCH:
                return total

    async def cancel_ids(self, team_id: str, ids: Sequence[UUID]) -> None:
        """Cancel those of a team's results of these ids that are pending."""
        statement = sql.CANCEL.format(where="team_id = $1 AND id = ANY($2::uuid[])")
        for start in range(0, len(ids), MAX_BATCH):
            await self._database.fetchrow(statement, team_id, list(ids[start : start + MAX_BATCH]))

    async def tell_stopped(self, ids: Sequence[UUID]) -> None:
        """Tell workers and waiters that results of these ids are gone."""
        for start in range(0, len(ids), MAX_BATCH):
            await self._database.fetch(sql.TELL_STOPPED, list(ids[start : start + MAX_BATCH]))

    async def rescue(self, lease_seconds: float) -> int:
        """Mark workers dead whose lease ran out, and free their results; how many results.

        Judges nothing while the server is younger than a lease. The caller must itself have been
        connected for one (see `maintenance`).
        """

        async def work(connection: Connection) -> list[UUID]:
            async with connection.transaction():
                lost = [
                    row["id"] for row in await connection.fetch(sql.LOST_WORKERS, lease_seconds)
                ]
                if lost:
                    await connection.execute(
                        "UPDATE workers SET dead_at = now() WHERE id = ANY($1::uuid[])", lost
                    )
            return lost

        await self._database.run(work)
        # Also those of workers marked dead by a rescuer that died before it freed them.
        return await self.release(await self._dead_owners())

    async def retire(self, worker_id: UUID) -> int:
        """End a worker's own id and hand its results back; they do not count as attempts.

        In one transaction: what a rescuer finds with a dead worker it counts as lost.
        """

        async def work(connection: Connection) -> int:
            async with connection.transaction():
                # A claim under way holds a weaker lock, which the update alone would not wait for:
                # what it takes must be there to be freed.
                await connection.execute(
                    """UPDATE workers SET dead_at = coalesce(dead_at, now())
                       WHERE id = (SELECT id FROM workers WHERE id = $1 FOR UPDATE)""",
                    worker_id,
                )
                released = 0
                while count := await self._release_some(connection, [worker_id], counted=False):
                    released += count
                return released

        return await self._database.run(work)

    async def release(self, worker_ids: Sequence[UUID]) -> int:
        """Free the results of lost workers, or end those that have no attempt or time left."""
        released = 0
        while worker_ids and (
            count := await self._database.run(
                lambda connection: self._release_some(connection, worker_ids, counted=True)
            )
        ):
            released += count
        return released

    async def _release_some(
        self, connection: Connection, worker_ids: Sequence[UUID], *, counted: bool
    ) -> int:
        count: int = await connection.fetchval(
            sql.RELEASE,
            list(worker_ids),
            counted,
            self._settings.max_attempts,
            self._settings.continue_lost_attempts,
            self._settings.continue_by_text,
        )
        return count

    async def clock(self) -> float:
        """The database's clock, in seconds since some moment."""
        row = await self._database.fetchrow(sql.CLOCK)
        assert row is not None
        seconds: float = row["seconds"]
        return seconds

    async def expire(self) -> int:
        """Fail queued results past their deadline; how many."""
        expired: int = 0
        while True:
            row = await self._database.fetchrow(sql.EXPIRE)
            assert row is not None
            expired += row["ended"]
            if row["ended"] < MAX_BATCH:
                return expired

    async def _dead_owners(self) -> list[UUID]:
        rows = await self._database.fetch(
            """SELECT w.id FROM workers w
               WHERE w.dead_at > now() - interval '1 day' AND EXISTS (
                 SELECT FROM results r WHERE r.worker_id = w.id AND r.state = 'pending')"""
        )
        return [row["id"] for row in rows]


def _to_columns(results: Sequence[NewResult]) -> list[Sequence[object]]:
    # Results of one group share theirs.
    contexts = {
        result.new_context.id: result.new_context for result in results if result.new_context
    }
    return [
        [context.id for context in contexts.values()],
        [context.team_id for context in contexts.values()],
        [context.content for context in contexts.values()],
        [context.messages for context in contexts.values()],
        [context.metadata for context in contexts.values()],
        [result.id for result in results],
        [result.team_id for result in results],
        [result.context_id for result in results],
        [result.model_name for result in results],
        [result.model_version for result in results],
        [result.prompt for result in results],
        [result.parameters for result in results],
        [result.priority for result in results],
        [result.deadline_seconds for result in results],
        [result.metadata for result in results],
        [result.group_id for result in results],
        [result.retry_of for result in results],
        [result.webhook_url for result in results],
        [result.on_disconnect for result in results],
        [1 / result.limits.weight for result in results],
        [result.new_context is not None for result in results],
        [result.request for result in results],
        [result.store for result in results],
        [result.kind for result in results],
        [result.source_id for result in results],
        [result.attribution for result in results],
        [result.retain_seconds for result in results],
        [result.trace for result in results],
        [result.resumable for result in results],
    ]


def _to_key_columns(keyed: Sequence[tuple[NewKey, NewResult]]) -> list[Sequence[object]]:
    return [
        [result.id for _, result in keyed],
        [result.team_id for _, result in keyed],
        [result.context_id for _, result in keyed],
        [result.new_context is not None for _, result in keyed],
        [result.prompt is not None for _, result in keyed],
        [key.key for key, _ in keyed],
        [key.request_hash for key, _ in keyed],
        [key.seconds for key, _ in keyed],
        [result.source_id for _, result in keyed],
    ]


def _is_new(result: NewResult) -> bool:
    """Whether it is surely nobody's repetition, and its prompt at hand."""
    has_prompt = result.prompt is not None or result.new_context is not None
    return has_prompt and result.key is None and not result.goes_with_key


def _to_first_claim(result: NewResult, prompt: str | None = None) -> Claim:
    """The claim of a result that is claimed as it is stored; `prompt` is of its saved context."""
    text = result.prompt
    if text is None:
        text = result.new_context.content if result.new_context else prompt
    assert text is not None, "a result without a prompt is not stored"
    return Claim(
        id=result.id,
        attempt=1,
        model_name=result.model_name,
        prompt=text,
        parameters=orjson.loads(result.parameters),
        seconds_left=result.deadline_seconds,
        is_suspect=False,
        has_attribution=result.attribution is not None,
        team_id=result.team_id,
        trace=result.trace,
        resumable=result.resumable,
    )


async def _append(
    connection: Connection, worker_id: UUID, chunks: Sequence[Chunk], watched: Sequence[UUID] = ()
) -> None:
    await connection.execute(
        sql.APPEND,
        worker_id,
        [chunk.result_id for chunk in chunks],
        [chunk.attempt for chunk in chunks],
        [chunk.offset for chunk in chunks],
        [chunk.text for chunk in chunks],
        [chunk.prompt_tokens for chunk in chunks],
        [chunk.completion_tokens for chunk in chunks],
        [chunk.logprobs for chunk in chunks],
        [chunk.token_ids for chunk in chunks],
        list(join_ids(watched)),
    )


async def _end_attempts(
    connection: Connection,
    worker_id: UUID,
    ends: Sequence[AttemptEnd],
    resent: bool,
    max_attempts: int,
    audience: ResultWaiters | None,
) -> list[bool]:
    failures = [end.failure for end in ends]
    awaited = [end.result_id for end in ends if audience and audience.awaits(end.result_id)]
    first, *others = await connection.fetch(
        sql.END_ATTEMPTS[bool(awaited), any(end.has_attribution for end in ends)],
        worker_id,
        [end.result_id for end in ends],
        [end.attempt for end in ends],
        [end.outcome for end in ends],
        [end.output for end in ends],
        [end.finish_reason for end in ends],
        [end.prompt_tokens for end in ends],
        [end.completion_tokens for end in ends],
        [end.logprobs for end in ends],
        [end.model_version for end in ends],
        [end.first_token_seconds for end in ends],
        [failure.code if failure else None for failure in failures],
        [failure.message if failure else None for failure in failures],
        [failure.retryable if failure else None for failure in failures],
        [end.retry_after_seconds for end in ends],
        [end.keeps_text for end in ends],
        [end.continued for end in ends],
        [end.continued_from for end in ends],
        max_attempts,
        *([awaited] if awaited else ()),
    )
    if audience and awaited and first["id"] is not None:
        for row in (first, *others):
            audience.hand(row)
    ours = set(first["ids"] or ())
    if resent and len(ours) < len(ends):
        again = await connection.fetch(
            sql.ALREADY_ENDED,
            worker_id,
            [end.result_id for end in ends],
            [end.attempt for end in ends],
        )
        ours |= {row["id"] for row in again}
        await await_standby(connection)
    return [end.result_id in ours for end in ends]


def _to_claim(row: Record, resume: Resume | None, *, is_resumable: bool) -> Claim:
    return Claim(
        id=row["id"],
        attempt=row["attempt"],
        model_name=row["model_name"],
        prompt=row["prompt"],
        parameters=orjson.loads(row["parameters"]),
        seconds_left=row["seconds_left"],
        is_suspect=row["engine_deaths"] >= SUSPECT_DEATHS,
        has_attribution=row["attribution"] is not None,
        team_id=row["team_id"],
        trace=row["trace"],
        resumable=row["resumable"] and is_resumable,
        resume=resume,
    )
