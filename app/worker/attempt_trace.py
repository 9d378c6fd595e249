"""Spans of an attempt's life: in the queue, the writes of its text, its end.

The call of the model has a span of its own (`backends.generation_span`).
"""

import time
from uuid import UUID

from app.core import tracing
from app.core.ids import created_at
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd
from app.worker.attempt import Attempt


def trace_queue(claim: Claim, worker_id: UUID) -> None:
    if tracing.active is None or claim.trace is None:
        return
    created = created_at(claim.id).timestamp()
    attributes = _attributes(claim, worker_id)
    tracing.active.record("queue", claim.trace, created, time.time(), attributes)


def trace_end(attempt: Attempt, end: AttemptEnd | None, ended_at: float, worker_id: UUID) -> None:
    claim = attempt.claim
    if tracing.active is None or claim.trace is None:
        return
    attributes = _attributes(claim, worker_id)
    if attempt.flushes is not None:
        # One span for all: a long answer is written a thousand times.
        flushes: tracing.Attributes = {
            "llm.flushes": attempt.flushes.count,
            "llm.slowest_flush_seconds": attempt.flushes.slowest,
        }
        first, last = attempt.flushes.first, attempt.flushes.last
        tracing.active.record("flush", claim.trace, first, last, {**attributes, **flushes})
    if end is not None:
        outcome = {"llm.outcome": str(end.outcome)}
        if end.failure is not None:
            outcome["error.type"] = str(end.failure.code)
        found = {**attributes, **outcome}
        tracing.active.record("finish", claim.trace, ended_at, time.time(), found)


def _attributes(claim: Claim, worker_id: UUID) -> tracing.Attributes:
    return {
        "llm.result_id": str(claim.id),
        "llm.attempt": claim.attempt,
        "llm.team_id": claim.team_id,
        "llm.worker_id": str(worker_id),
        "llm.model": claim.model_name,
    }
