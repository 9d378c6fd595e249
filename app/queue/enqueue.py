"""Enqueueing: one statement stores new results, and may claim them for the worker of this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal, Protocol
from uuid import UUID

import orjson

from app.core.database import Connection, await_standby
from app.core.record_set import Json, RecordSet
from app.queue.claim import Claim, may_claim_sql, without_suspects_sql
from app.queue.idempotency import NewKey, take_keys_sql
from app.queue.notifications import notify_enqueued
from app.queue.team_limits import Limits, without_running_limits_sql
from app.queue.virtual_time import is_queue_empty_sql, next_key_sql, step_behind_sql

MAX_ENQUEUE = 1000
NO_LIMITS = Limits()

OnDisconnect = Literal["continue", "cancel"]
Kind = Literal["generation", "attribution"]


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
    expected_bytes: int = 0  # that its worker may hold for it


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


CONTEXTS = RecordSet(NewContext)
# The members that stay in this process. Choices share their prompt: each text is sent once.
_UNSTORED = (
    *("new_context", "key", "goes_with_key", "tokens", "limits", "prompt", "expected_bytes"),
)
_COLUMNS = (*RecordSet(NewResult, _UNSTORED).types, "prompt")
# `step`: between two results of a team in virtual time.
_COMPUTED: dict[str, tuple[str, Callable[[NewResult], object]]] = {
    "step": ("float8", lambda result: 1 / result.limits.weight),
    "has_new_context": ("bool", lambda result: result.new_context is not None),
    "may_start": ("bool", lambda _: False),
    "prompt_place": ("int", lambda _: None),  # in the array of prompts, from 1 on
}
_RESULTS = RecordSet(NewResult, _UNSTORED, _COMPUTED)
_KEYED_RESULTS = RecordSet(
    NewResult,
    _UNSTORED,
    {
        **_COMPUTED,
        "key": ("text", lambda result: result.key and result.key.key),
        "request_hash": ("bytea", lambda result: result.key and result.key.request_hash),
        "key_seconds": ("float8", lambda result: result.key and result.key.seconds),
    },
)

# Whether the context of a new result `i` exists, as plain text unless the prompt is rendered, and the
# result that an attribution is about. Both are locked, the context first, as its deletion does: a
# deletion or erasure under way is awaited, and they are missing then.
_HAS_SOURCES = """CASE WHEN i.has_new_context OR EXISTS (
      SELECT FROM contexts c WHERE c.id = i.context_id AND c.team_id = i.team_id
        AND (i.prompt IS NOT NULL OR c.content IS NOT NULL) AND c.erased_at IS NULL FOR KEY SHARE)
    THEN i.source_id IS NULL OR EXISTS (
      SELECT FROM results s WHERE s.id = i.source_id AND s.team_id = i.team_id FOR KEY SHARE)
    ELSE false END"""


def _enqueue_sql(
    results: RecordSet[NewResult], keys: str, is_context_kept: str, is_result_kept: str
) -> str:
    """Insert contexts and results for the worker $1; `keys` are CTEs that take their keys before."""
    return f"""
WITH input AS MATERIALIZED (
  SELECT i.*, (${2 + len(CONTEXTS.types) + len(results.types)}::text[])[i.prompt_place] AS prompt
  FROM ({results.select(2 + len(CONTEXTS.types))}) i
),
{keys} new_contexts AS (
  INSERT INTO contexts ({", ".join(CONTEXTS.types)})
  SELECT * FROM ({CONTEXTS.select(2)}) c WHERE {is_context_kept}
  ON CONFLICT (id) DO NOTHING
), flows AS MATERIALIZED (
  SELECT f.*, {next_key_sql("f")} AS first_key
  FROM (SELECT DISTINCT ON (team_id, model_name, priority) team_id, model_name, priority, step
        FROM input) f
), me AS (
  SELECT id FROM workers WHERE id = $1::uuid AND dead_at IS NULL FOR KEY SHARE
), idle AS MATERIALIZED (
  -- Models with an empty queue: a new result overtakes no other.
  SELECT m.model_name, m.team_id, me.id AS worker_id
  FROM me, (SELECT DISTINCT model_name, team_id FROM input WHERE may_start) m
  WHERE {may_claim_sql("m.model_name")} AND {is_queue_empty_sql("m.model_name")}
  AND {without_suspects_sql("m.model_name")}
  AND {without_running_limits_sql("m.model_name", "m.team_id")}
), inserted AS (
  INSERT INTO results ({", ".join(_COLUMNS)}, deadline_at, fair_key, worker_id, attempt, started_at)
  SELECT i.{", i.".join(_COLUMNS)}, now() + make_interval(secs => i.deadline_seconds), f.first_key + {step_behind_sql("i")},
         idle.worker_id, (idle.worker_id IS NOT NULL)::int,
         -- Not the clock: their attempts began with this statement, which may wait for locks.
         CASE WHEN idle.worker_id IS NOT NULL THEN now() END
  FROM input i JOIN flows f USING (team_id, model_name, priority)
  LEFT JOIN idle ON i.may_start AND (idle.model_name, idle.team_id) = (i.model_name, i.team_id)
  WHERE {_HAS_SOURCES} AND {is_result_kept}
  ON CONFLICT (id) DO NOTHING
  RETURNING id, model_name, context_id, prompt, worker_id
)
SELECT array_agg(id) AS ids,
  array_agg(id) FILTER (WHERE worker_id IS NOT NULL) AS started,
  -- Prompts from stored contexts; this statement does not see its new ones.
  array_agg(coalesce(prompt, (SELECT content FROM contexts c WHERE c.id = context_id)))
    FILTER (WHERE worker_id IS NOT NULL) AS prompts,
  {notify_enqueued("worker_id IS NULL")}
FROM inserted
"""


ENQUEUE = _enqueue_sql(_RESULTS, "", "true", "true")
# A group has the id of its first result, and that one's key: it is stored whole or not at all.
_IS_REFUSED = (
    "i.id IN (SELECT id FROM refused) OR coalesce(i.group_id IN (SELECT id FROM refused), false)"
)
_ENQUEUE_WITH_KEYS = _enqueue_sql(
    _KEYED_RESULTS,
    take_keys_sql(_HAS_SOURCES),
    f"id NOT IN (SELECT i.context_id FROM input i WHERE {_IS_REFUSED})",
    f"NOT ({_IS_REFUSED})",
)
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
    has_keys = any(result.key is not None for result in results)
    columns = _KEYED_RESULTS if has_keys else _RESULTS
    row = await connection.fetchrow(
        _ENQUEUE_WITH_KEYS if has_keys else ENQUEUE,
        *to_arguments(results, slots, worker_id, columns),
    )
    assert row is not None
    new = {result.id: result for result in results}
    started = zip(row["started"] or (), row["prompts"] or (), strict=True)
    claims = [_to_claim(new[result_id], prompt) for result_id, prompt in started]
    return set(row["ids"] or ()), claims


def to_arguments(
    results: Sequence[NewResult],
    slots: Sequence[bool],
    worker_id: UUID | None,
    columns: RecordSet[NewResult] = _RESULTS,
) -> list[object]:
    # Results of one group share their context.
    contexts = {one.new_context.id: one.new_context for one in results if one.new_context}
    prompts: dict[str, int] = {}
    places = [
        None if one.prompt is None else prompts.setdefault(one.prompt, len(prompts) + 1)
        for one in results
    ]
    return [
        worker_id,
        *CONTEXTS.arguments(contexts.values()),
        *columns.arguments(results, may_start=slots, prompt_place=places),
        list(prompts),
    ]


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
    """Return whether it cannot repeat an earlier request, and its prompt is at hand."""
    has_prompt = result.prompt is not None or result.new_context is not None
    return has_prompt and result.key is None and not result.goes_with_key


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
        team_id=result.team_id,
        trace=result.trace,
        resumable=result.resumable,
        expected_bytes=result.expected_bytes,
    )
