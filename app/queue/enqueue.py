"""Enqueueing: one statement stores new results, and may claim them for the worker of this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from operator import attrgetter
from typing import Literal, Protocol
from uuid import UUID

import orjson

from app.core.database import Connection, await_standby
from app.core.record_set import Json, RecordSet
from app.queue.claim import Claim
from app.queue.enqueue_sql import Parts, enqueue_sql
from app.queue.idempotency import NewKey
from app.queue.job_rows import JobRow
from app.queue.team_limits import Limits

MAX_ENQUEUE = 1000
NO_LIMITS = Limits()

OnDisconnect = Literal["continue", "cancel"]
Kind = Literal["generation", "attribution", "embedding", "score"]


@dataclass(slots=True, frozen=True)
class NewContext:
    """A prompt to store: plain `content` or chat `messages`; exactly one."""

    id: UUID
    team_id: str
    content: str | None
    messages: Json | None
    metadata: Json


@dataclass(slots=True, frozen=True)
class NewResult:
    """A validated request to enqueue."""

    id: UUID
    team_id: str
    context_id: UUID
    model_name: str
    parameters: Json
    deadline_seconds: float
    model_version: int | None = None
    prompt: str | None = None
    priority: int = 0
    metadata: Json = "{}"
    group_id: UUID | None = None
    retry_of: UUID | None = None
    new_context: NewContext | None = None
    webhook_url: str | None = None
    key: NewKey | None = None
    job: JobRow | None = None  # never beside a key
    goes_with_key: bool = False  # the key of its group's first result
    on_disconnect: OnDisconnect = "continue"
    waiter_id: UUID | None = None  # the API process of its client, if a disconnect cancels it
    request: Json | None = None  # members that its dialect echoes in the answer
    store: bool = True  # otherwise its texts are erased once it is delivered
    kind: Kind = "generation"
    source_id: UUID | None = None  # of an attribution: the result whose text it is about
    attribution: Json | None = None  # the one that follows its completion
    retain_seconds: float | None = None  # from its end on; None: by its team's policy
    tokens: int = 0  # of prompt and answer at most: its cost in its team's token rate
    limits: Limits = NO_LIMITS  # of its team and model
    trace: str | None = None  # the context of its request's trace (`traceparent`)
    resumable: bool = False  # whether the text of a lost attempt may be continued
    token_id: str | None = None  # of its request, for its usage
    expected_bytes: int = 0  # that its worker may hold for it
    reuse_digest: bytes | None = None  # of its request, if an equal result may answer it
    has_images: bool = False  # which its worker reads from the stored context


class EagerDispatcher(Protocol):
    """The worker of this process, which runs new results without waiting for a claim."""

    @property
    def worker_id(self) -> UUID: ...

    def reserve(self, results: Sequence[tuple[str, int]]) -> list[bool]:
        """Return for each result, given by its model and expected bytes, whether it may start."""

    def begin(self, claims: Sequence[Claim]) -> None:
        """Generate for results that are being stored, and write nothing of them yet."""

    def confirm(self, worker_id: UUID, claims: Sequence[Claim]) -> None:
        """Run the results that are committed as claimed by `worker_id`; stop others that began."""

    def abort(self, worker_id: UUID) -> None:
        """Stop all that began: nothing is known to be committed."""


@dataclass(slots=True)
class _Flow:
    """New results of one team, model and priority: one queue, in which each stands a step behind."""

    place: int  # from 1 on
    team_id: str
    model_name: str
    priority: int
    step: float  # in virtual time
    may_start: bool = False  # one of them


CONTEXTS = RecordSet(NewContext)
# The members that stay in this process.
_UNSTORED = (
    *("new_context", "key", "job", "goes_with_key", "tokens", "limits", "prompt"),
    *("expected_bytes", "reuse_digest", "has_images"),
)
_OWN = ("id", "context_id")
# The others are alike in most results of a statement: each combination is sent once.
_FORMS = RecordSet(NewResult, (*_UNSTORED, *_OWN))
_to_form = attrgetter(*_FORMS.types)
_FLOWS = RecordSet(_Flow)
# Places in the arrays of forms, flows and prompts, from 1 on. Choices share their prompt.
_COMPUTED: dict[str, tuple[str, Callable[[NewResult], object]]] = {
    "form": ("int", lambda _: None),
    "flow": ("int", lambda _: None),
    "prompt_place": ("int", lambda _: None),
    "has_new_context": ("bool", lambda result: result.new_context is not None),
    "may_start": ("bool", lambda _: False),
}
_KEY: dict[str, tuple[str, Callable[[NewResult], object]]] = {
    "key": ("text", lambda result: result.key and result.key.key),
    "request_hash": ("bytea", lambda result: result.key and result.key.request_hash),
    "key_seconds": ("float8", lambda result: result.key and result.key.seconds),
}
_JOB: dict[str, tuple[str, Callable[[NewResult], object]]] = {
    "job_id": ("uuid", lambda result: result.job and result.job.job_id),
    "job_key": ("text", lambda result: result.job and result.job.key),
    "job_request_hash": ("bytea", lambda result: result.job and result.job.request_hash),
    "replaces": ("uuid", lambda result: result.job and result.job.replaces),
    "replaced_as": ("text", lambda result: result.job and result.job.replaced_as),
}
_REUSE: dict[str, tuple[str, Callable[[NewResult], object]]] = {
    "reuse_digest": ("bytea", lambda result: result.reuse_digest),
}


@cache
def _results(*, keys: bool, jobs: bool, reuses: bool) -> RecordSet[NewResult]:
    computed = _COMPUTED | (_KEY if keys else {}) | (_JOB if jobs else {})
    computed |= _REUSE if reuses else {}
    return RecordSet(NewResult, (*_UNSTORED, *_FORMS.types), computed)


@cache
def _enqueue_sql(parts: Parts) -> str:
    results = _results(keys=parts.keys, jobs=parts.jobs, reuses=parts.reuses)
    return enqueue_sql(parts, CONTEXTS, results, _FORMS, _FLOWS)


_ALREADY_ENQUEUED = "SELECT id FROM results WHERE id = ANY($1::uuid[])"


async def enqueue(
    connection: Connection,
    results: Sequence[NewResult],
    dispatcher: EagerDispatcher | None,
    *,
    resent: bool,
) -> list[bool]:
    """Commit new results; whether each is stored.

    If no result waits for a model, the dispatcher's worker claims new ones by the same statement:
    one write less for each, and no notification. The model generates while the statement runs.
    """
    if not results:
        return []
    # In the order of claims: the free slots go to the highest priority.
    in_order = sorted(results, key=lambda result: -result.priority)
    slots = _reserve(dispatcher, in_order)
    if dispatcher is None or not any(slots):
        stored, _ = await _insert(connection, in_order, slots, None)
    else:
        worker_id = dispatcher.worker_id
        if not resent:
            dispatcher.begin([_to_claim(one) for one in compress(in_order, slots) if _is_new(one)])
        try:
            stored, claims = await _insert(connection, in_order, slots, worker_id)
        except BaseException:
            dispatcher.abort(worker_id)
            raise
        dispatcher.confirm(worker_id, claims)
    if resent and len(stored) < len(results):
        # The first sending may have been committed although its answer was lost. The heartbeat
        # returns results that it claimed.
        ids = [result.id for result in results]
        stored |= {row["id"] for row in await connection.fetch(_ALREADY_ENQUEUED, ids)}
        await await_standby(connection)
    return [result.id in stored for result in results]


def _reserve(dispatcher: EagerDispatcher | None, results: Sequence[NewResult]) -> list[bool]:
    if dispatcher is None:
        return [False] * len(results)
    slots = dispatcher.reserve([(one.model_name, one.expected_bytes) for one in results])
    # Only a claim counts how many results of a team run.
    return [
        is_free and result.limits.max_running is None
        for is_free, result in zip(slots, results, strict=True)
    ]


async def _insert(
    connection: Connection,
    results: Sequence[NewResult],
    slots: Sequence[bool],
    worker_id: UUID | None,
) -> tuple[set[UUID], list[Claim]]:
    """Return the ids of the stored results, and the claims of those that start at once."""
    statement, arguments = to_statement(results, slots, worker_id)
    row = await connection.fetchrow(statement, *arguments)
    assert row is not None
    if worker_id is None:
        return set(row["ids"] or ()), []
    new = {result.id: result for result in results}
    started = zip(row["started"] or (), row["prompts"] or (), strict=True)
    claims = [_to_claim(new[result_id], prompt) for result_id, prompt in started]
    return set(row["ids"] or ()), claims


def to_statement(
    results: Sequence[NewResult], slots: Sequence[bool], worker_id: UUID | None
) -> tuple[str, list[object]]:
    """Return the statement that stores new results, and its arguments; `slots`: which may start."""
    # Results of one group share their context.
    contexts = {one.new_context.id: one.new_context for one in results if one.new_context}
    parts = Parts(
        is_one=len(results) == 1,
        keys=any(one.key is not None for one in results),
        new_contexts=bool(contexts),
        stored_contexts=any(one.new_context is None for one in results),
        sources=any(one.source_id is not None for one in results),
        starts=worker_id is not None,
        jobs=any(one.job is not None for one in results),
        replaces=any(one.job is not None and one.job.replaces is not None for one in results),
        reuses=any(one.reuse_digest is not None for one in results),
    )
    forms: dict[object, int] = {}
    flows: dict[tuple[str, str, int], _Flow] = {}
    prompts: dict[str, int] = {}
    places: list[tuple[int, int, int | None]] = []
    for one, may_start in zip(results, slots, strict=True):
        name = one.team_id, one.model_name, one.priority
        if (flow := flows.get(name)) is None:
            flow = flows[name] = _Flow(len(flows) + 1, *name, 1 / one.limits.weight)
        flow.may_start |= may_start
        form = forms.setdefault(_to_form(one), len(forms) + 1)
        text = None if one.prompt is None else prompts.setdefault(one.prompt, len(prompts) + 1)
        places.append((form, flow.place, text))
    form_places, flow_places, prompt_places = zip(*places, strict=True)
    columns = [
        *(CONTEXTS.arguments(contexts.values()) if contexts else ()),
        *_results(keys=parts.keys, jobs=parts.jobs, reuses=parts.reuses).arguments(
            results, form=form_places, flow=flow_places, prompt_place=prompt_places, may_start=slots
        ),
        *zip(*forms, strict=True),
        *_FLOWS.arguments(flows.values()),
    ]
    sent = [column[0] for column in columns] if parts.is_one else columns
    worker = [worker_id] if parts.starts else []
    return _enqueue_sql(parts), [*worker, *sent, list(prompts)]


def context_bytes(context: NewContext) -> int:
    return len(context.content or "") + len(context.messages or "") + len(context.metadata)


def enqueue_bytes(results: Sequence[NewResult]) -> int:
    """Return about how many bytes the results of one request take in a statement."""
    texts = {id(one.prompt): len(one.prompt or "") for one in results}
    for one in results:
        if one.new_context is not None:
            texts[id(one.new_context)] = context_bytes(one.new_context)
    return sum(texts.values()) + sum(len(one.parameters) + len(one.metadata) for one in results)


def _is_new(result: NewResult) -> bool:
    """Return whether it cannot repeat an earlier request, and all of its prompt is at hand."""
    has_prompt = result.prompt is not None or result.new_context is not None
    has_prompt = has_prompt and not result.has_images
    return has_prompt and result.key is None and result.job is None and not result.goes_with_key


def _to_claim(result: NewResult, stored_prompt: str | None = None) -> Claim:
    prompt = result.prompt
    if prompt is None:
        prompt = result.new_context.content if result.new_context else stored_prompt
    assert prompt is not None, "a result without a prompt is not stored"
    return Claim(
        id=result.id,
        attempt=1,
        model_name=result.model_name,
        prompt=prompt,
        parameters=orjson.loads(result.parameters),
        seconds_left=result.deadline_seconds,
        is_suspect=False,
        has_attribution=result.attribution is not None,
        has_webhook=result.webhook_url is not None,
        team_id=result.team_id,
        trace=result.trace,
        resumable=result.resumable,
        expected_bytes=result.expected_bytes,
        is_chat=result.prompt is not None,
    )
