"""The end of attempts, as their worker reports it: a result ends, or returns to the queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Protocol, Self
from uuid import UUID

from asyncpg import Record

from app.core.database import Connection, await_standby
from app.core.errors import Failure
from app.core.record_set import RecordSet
from app.queue.claim import SUSPECT_DEATHS
from app.queue.notifications import notify_enqueued
from app.queue.progress import is_ours_sql, json_list, lock_ours_sql
from app.queue.terminal_state import JUDGED, conclude_sql, notify_concluded
from app.queue.virtual_time import next_key_sql, step_behind_sql

# The columns of a result for its readers: its end gives the same to those who wait in its process.
READ_COLUMNS = (
    "id", "team_id", "context_id", "model_name", "model_version", "state", "output", "error_code",
    "error_message", "error_retryable", "finish_reason", "parameters", "prompt_tokens",
    "completion_tokens", "attempt", "cancel_requested_at", "started_at", "first_token_at",
    "finished_at", "metadata", "retry_of", "logprobs", "erased_at", "store", "request", "kind",
    "source_id", "attribution", "text_attempt", "continuations", "prompt_logprobs",
    "vector", "reused_from",
)  # fmt: skip


class AttemptOutcome(StrEnum):
    """The end of an attempt from the view of its worker. The queue decides the result's state."""

    COMPLETED = "completed"
    FAILED = "failed"
    LOST = "lost"  # Triton took the request, then the stream broke: counts as an attempt
    RETURNED = "returned"  # never taken, or handed back at shutdown: counts for nothing


@dataclass(slots=True, frozen=True)
class AttemptEnd:
    """The end of one attempt: its outcome, and the model's answer until then."""

    result_id: UUID
    attempt: int
    outcome: AttemptOutcome
    output: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprobs: Sequence[bytes] = ()  # as parts of a JSON list
    prompt_logprobs: str | None = None  # as JSON
    vector: bytes | None = None  # little-endian FP32
    model_version: int | None = None
    first_token_seconds: float | None = None
    failure: Failure | None = None
    retry_after_seconds: float = 0.0
    has_attribution: bool = False
    has_webhook: bool = True  # or may have one
    has_chunks: bool = True  # or may have some, of earlier attempts too
    # If the result is requeued: whether its stored text stays. `output` is empty where the attempt
    # leaves it as it found it.
    keeps_text: bool = False
    continued_from: int | None = None  # length of the text that it was to continue
    continued: bool = False  # and the model did


def end_bytes(end: AttemptEnd) -> int:
    """Return about how many bytes an end takes in a statement."""
    others = len(end.prompt_logprobs or "") + len(end.vector or b"")
    return len(end.output) + others + sum(map(len, end.logprobs))


class ResultWaiters(Protocol):
    """The readers in this process that wait for results to end."""

    def awaits(self, result_id: UUID) -> bool: ...

    def deliver(self, row: Record) -> None:
        """Deliver a result that has just ended, with its READ_COLUMNS."""


_ENDS = RecordSet(
    AttemptEnd,
    ("failure", "has_attribution", "has_webhook", "has_chunks", "logprobs"),
    {
        "logprobs": ("text", lambda end: json_list(end.logprobs)),
        "error_code": ("text", lambda end: end.failure and end.failure.code),
        "error_message": ("text", lambda end: end.failure and end.failure.message),
        "error_retryable": ("bool", lambda end: end.failure and end.failure.retryable),
    },
)
_MAX_ATTEMPTS = f"${2 + len(_ENDS.types)}::int"

# An attribution refers to its source's context, which is locked before results are: a context's
# deletion takes this order.
_HOLD_CONTEXTS = """held AS MATERIALIZED (
  SELECT id FROM contexts WHERE id IN (SELECT context_id FROM results WHERE id = ANY($2::uuid[]))
  ORDER BY id FOR KEY SHARE
), """
_CONTEXTS_ARE_HELD = "(SELECT count(*) FROM held) >= 0"

# The attributions that completed texts were sent with become results. If several of one team are
# stored at once, each stands a step behind the other.
_ATTRIBUTE = f"""due AS (
  SELECT e.id, e.team_id, e.context_id, e.output, e.priority, e.webhook_url, e.store,
    e.retain_seconds, e.trace, e.token_id, e.attribution, e.attribution ->> 'queue' AS model_name, 1 / coalesce(
    (SELECT l.weight FROM team_limits l WHERE l.team_id = e.team_id AND l.weight IS NOT NULL
       AND l.model_name IN (e.attribution ->> 'queue', '*')
     ORDER BY l.model_name = '*' LIMIT 1), 1) AS step
  FROM ended e WHERE e.state = 'completed' AND e.attribution IS NOT NULL
), attributions AS (
  INSERT INTO results (id, team_id, kind, context_id, source_id, model_name, prompt, parameters,
                       priority, deadline_at, deadline_seconds, webhook_url, store, retain_seconds,
                       trace, token_id, fair_key)
  SELECT (d.attribution ->> 'id')::uuid, d.team_id, 'attribution', d.context_id, d.id, d.model_name,
         d.output, d.attribution -> 'parameters', d.priority,
         now() + make_interval(secs => (d.attribution ->> 'deadline_seconds')::float8),
         (d.attribution ->> 'deadline_seconds')::float8, d.webhook_url, d.store,
         d.retain_seconds, d.trace, d.token_id, {next_key_sql("d")} + {step_behind_sql("d")}
  FROM due d
  ON CONFLICT (id) DO NOTHING RETURNING model_name
), """
_ATTRIBUTED = (
    "attribution",
    "context_id",
    "priority",
    "output",
    "store",
    "retain_seconds",
    "trace",
    "token_id",
)


_FINAL_OUTCOMES = (AttemptOutcome.COMPLETED, AttemptOutcome.FAILED)


def _final_cases(row: str) -> str:
    return f"""WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
      WHEN {row}.outcome IN ('completed', 'failed') THEN {row}.outcome"""


def _judged_sql(*, attributes: bool) -> str:
    columns = "r.id, r.cancel_requested_at, r.deadline_at, r.lost_attempts, r.engine_deaths"
    condition = _CONTEXTS_ARE_HELD if attributes else "true"
    return f"""{_HOLD_CONTEXTS if attributes else ""}judged AS MATERIALIZED (
  SELECT r.id, i.*, i.outcome = 'lost' AS lost, i.outcome = 'lost' AS engine_died,
    CASE {_final_cases("i")}
      WHEN r.deadline_at <= now() THEN 'expired'
      WHEN i.outcome = 'lost' AND r.lost_attempts + 1 >= {_MAX_ATTEMPTS} THEN
        CASE WHEN r.engine_deaths >= {SUSPECT_DEATHS} THEN 'crashed' ELSE 'failed' END
      ELSE 'requeued' END AS verdict
  FROM {lock_ours_sql(_ENDS.select(2), columns, "UPDATE", condition)}
), """


# A single end that is final: scalars, and no lock before its update, which is its only one.
_ONE = f"""(SELECT i.*, false AS lost, false AS engine_died FROM ({_ENDS.select(2, is_one=True)}) i) j
  WHERE r.id = j.result_id AND {is_ours_sql("j")}"""
_VERDICT_ON_ONE = f"CASE {_final_cases('j')} END"


@dataclass(slots=True, frozen=True)
class _Batch:
    """Needs of some ends, which decide the parts of their statement."""

    is_one: bool  # a single one, final, without an attribution
    is_final: bool  # all completed or failed: none returns to the queue
    reads: bool  # some are awaited, with their READ_COLUMNS
    attributes: bool
    delivers: bool
    sweeps: bool

    @classmethod
    def of(cls, ends: Sequence[AttemptEnd], *, reads: bool) -> Self:
        is_final = all(end.outcome in _FINAL_OUTCOMES for end in ends)
        attributes = any(end.has_attribution for end in ends)
        return cls(
            is_one=len(ends) == 1 and is_final and not attributes,
            is_final=is_final,
            reads=reads,
            attributes=attributes,
            delivers=any(end.has_webhook for end in ends),
            sweeps=any(end.has_chunks for end in ends),
        )


@cache
def _end_attempts_sql(batch: _Batch) -> str:
    """End a batch of attempts; returns the ids of those that were the worker's."""
    columns = ["id", "state", "team_id", "webhook_url"]
    # Both copy each row with all its text.
    columns += _ATTRIBUTED if batch.attributes else ()
    columns += READ_COLUMNS if batch.reads else ()
    returned = ", ".join(f"r.{column}" for column in dict.fromkeys(columns))
    judged = "" if batch.is_one else _judged_sql(attributes=batch.attributes)
    update = (_ONE, _VERDICT_ON_ONE) if batch.is_one else JUDGED
    concluded = conclude_sql(
        *(returned, *update),
        requeues=not batch.is_final,
        delivers=batch.delivers,
        sweeps=batch.sweeps,
    )
    attributions = _ATTRIBUTE if batch.attributes else ""
    enqueued = f"(SELECT {notify_enqueued()} FROM attributions)" if batch.attributes else "NULL"
    ids, ended = "t.ids", ""
    if batch.reads:
        awaited = "true" if batch.is_one else f"e.id = ANY(${3 + len(_ENDS.types)}::uuid[])"
        ended = f"LEFT JOIN ended e ON {awaited}"
        # In one row: in each of them they would be the square of the batch.
        ids = "CASE WHEN row_number() OVER () = 1 THEN t.ids END AS ids, e.*"
    return f"""
WITH {judged}{concluded}, {attributions}totals AS (
  SELECT array_agg(id) AS ids, {notify_concluded(delivers=batch.delivers)}, {enqueued} AS enqueued
  FROM concluded
)
SELECT t.ended, t.deliveries, t.enqueued, {ids} FROM totals t {ended}
"""


_ALREADY_ENDED = """
SELECT r.id FROM results r
JOIN unnest($2::uuid[], $3::int[]) AS i(id, attempt) ON r.id = i.id
WHERE r.attempt = i.attempt AND (r.worker_id = $1 AND r.state <> 'pending' OR r.worker_id IS NULL)
"""


async def end_attempts(
    connection: Connection,
    worker_id: UUID,
    ends: Sequence[AttemptEnd],
    max_attempts: int,
    waiters: ResultWaiters | None,
    *,
    resent: bool,
) -> list[bool]:
    """Commit ends, and deliver awaited results; for each end, True if it was the worker's."""
    awaited = [end.result_id for end in ends if waiters and waiters.awaits(end.result_id)]
    batch = _Batch.of(ends, reads=bool(awaited))
    if batch.is_one:
        arguments = _ENDS.arguments_of_one(ends[0])
    else:
        in_order = sorted(ends, key=attrgetter("result_id"))
        arguments = [*_ENDS.arguments(in_order), max_attempts, *([awaited] if awaited else ())]
    rows = await connection.fetch(_end_attempts_sql(batch), worker_id, *arguments)
    if waiters and awaited and rows[0]["id"] is not None:
        for row in rows:
            waiters.deliver(row)
    ours = set(rows[0]["ids"] or ())
    if resent and len(ours) < len(ends):
        ids, attempts = [end.result_id for end in ends], [end.attempt for end in ends]
        again = await connection.fetch(_ALREADY_ENDED, worker_id, ids, attempts)
        ours |= {row["id"] for row in again}
        await await_standby(connection)
    return [end.result_id in ours for end in ends]
