"""Spans of an attempt: which are recorded, and with what."""

from dataclasses import replace
from typing import Any, cast

import pytest

from app.core import tracing
from app.core.errors import CANCELLED
from app.core.ids import created_at, new_id
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.worker.attempt import Flushes
from app.worker.attempt_trace import trace_end, trace_queue
from tests.unit.worker.test_attempt import Scripted, claim_of

WORKER = new_id()


class Spans:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: dict[str, Any],
    ) -> None:
        self.found.append((name, parent, start, end, attributes))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    spans = Spans()
    monkeypatch.setattr(tracing, "active", cast(tracing.Tracing, spans))
    return spans


@pytest.fixture
def claim() -> Claim:
    return replace(claim_of(), trace="00-1-2-01", team_id="red")


def end_of(claim: Claim, **members: Any) -> AttemptEnd:
    return AttemptEnd(claim.id, claim.attempt, AttemptOutcome.COMPLETED, **members)


async def test_an_untraced_result_leaves_no_span(
    spans: Spans, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that a process without traces accepted, or a worker without traces."""
    untraced = replace(claim, trace=None)
    trace_queue(untraced, WORKER)
    trace_end(Scripted(untraced), end_of(untraced), 1.0, WORKER)
    assert spans.found == []
    monkeypatch.setattr(tracing, "active", None)
    trace_queue(claim, WORKER)
    trace_end(Scripted(claim), end_of(claim), 1.0, WORKER)


def test_the_wait_in_the_queue_begins_with_the_result(spans: Spans, claim: Claim) -> None:
    trace_queue(claim, WORKER)
    ((name, parent, start, end, attributes),) = spans.found
    assert (name, parent) == ("queue", "00-1-2-01")
    assert created_at(claim.id).timestamp() == start <= end
    assert attributes == {
        "llm.result_id": str(claim.id),
        "llm.attempt": 3,
        "llm.team_id": "red",
        "llm.worker_id": str(WORKER),
        "llm.model": "m",
    }


async def test_an_end_has_its_error_and_no_tokens(spans: Spans, claim: Claim) -> None:
    attempt = Scripted(claim)
    trace_end(attempt, end_of(claim), 1.0, WORKER)
    trace_end(
        attempt, end_of(claim, prompt_tokens=5, completion_tokens=7, failure=CANCELLED), 2.0, WORKER
    )
    trace_end(attempt, None, 3.0, WORKER)  # not ours: no end
    found = [
        (name, start, attributes.get("error.type")) for name, _, start, _, attributes in spans.found
    ]
    assert found == [("finish", 1.0, None), ("finish", 2.0, "cancelled")]
    # The call of the model has them: tools add up those of all spans.
    assert "gen_ai" not in str(spans.found)


async def test_the_writes_of_a_text_are_one_span(spans: Spans, claim: Claim) -> None:
    attempt = Scripted(claim)
    attempt.flushes = Flushes(1.0, 2.0, 4, 0.5)
    trace_end(attempt, None, 3.0, WORKER)
    ((name, _, start, end, attributes),) = spans.found
    assert (name, start, end) == ("flush", 1.0, 2.0)
    assert (attributes["llm.flushes"], attributes["llm.slowest_flush_seconds"]) == (4, 0.5)
    assert attributes["llm.team_id"] == "red"
