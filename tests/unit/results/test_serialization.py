"""Results as JSON members of the native API: those of a new one, and those that come with its end."""

from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from app.core.ids import created_at, new_id
from app.queue.enqueue import NewResult
from app.results.contexts import Context
from app.results.rows import AttemptsRow
from app.results.serialization import (
    accepted_to_wire,
    attempts_to_wire,
    context_to_wire,
    result_to_wire,
)
from tests.result_rows import result_row

START = datetime(2090, 1, 1, tzinfo=UTC)


def plain(wire: dict[str, Any]) -> dict[str, Any]:
    """The members as a client reads them."""
    found: dict[str, Any] = orjson.loads(orjson.dumps(wire))
    return found


def test_an_accepted_result_has_every_member_of_one_that_has_not_begun() -> None:
    result = NewResult(
        new_id(), "default", new_id(), "m", '{"max_tokens": 4}', 60.0, model_version=2, metadata='{"a": 1}'
    )  # fmt: skip
    created = created_at(result.id)
    assert plain(accepted_to_wire(result, model_ready=True)) == plain({
        "id": str(result.id), "kind": "generation", "context_id": str(result.context_id),
        "model_name": "m", "model_version": 2, "model_ready": True, "state": "pending",
        "result": None, "error": None, "finish_reason": None, "parameters": {"max_tokens": 4},
        "usage": None, "attempt": 0, "continued": 0, "cancel_requested_at": None,
        "created_at": created, "updated_at": created, "started_at": None, "first_token_at": None,
        "finished_at": None, "metadata": {"a": 1}, "retry_of": None, "queue_position": None,
        "estimated_wait_seconds": None,
    })  # fmt: skip


def test_the_members_of_an_end() -> None:
    row = result_row(
        attempt=3, continuations=2, retry_of=new_id(), logprobs="[1]", erased_at=START,
        cancel_requested_at=START, started_at=START, first_token_at=START, finished_at=START,
        error_code="cancelled", error_message="Cancelled.", error_retryable=False, state="failed",
    )  # fmt: skip
    wire = plain(result_to_wire(row, model_ready=False))
    at = START.isoformat()
    expected = {
        "state": "failed", "result": "x", "finish_reason": "stop", "attempt": 3, "continued": 2,
        "retry_of": str(row.retry_of), "logprobs": [1], "model_ready": False,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "error": {"code": "cancelled", "message": "Cancelled.", "retryable": False},
        **dict.fromkeys(("erased_at", "cancel_requested_at", "started_at", "updated_at"), at),
        **dict.fromkeys(("first_token_at", "finished_at"), at),
    }  # fmt: skip
    assert {name: wire[name] for name in expected} == expected


def test_members_that_a_result_lacks_are_null_or_absent() -> None:
    row = result_row(output=None, completion_tokens=None, prompt_tokens=None, state="pending")
    wire = plain(result_to_wire(row, model_ready=True))
    assert [wire[name] for name in ("result", "error", "usage", "state")] == [None] * 3 + [
        "pending"
    ]
    assert not {"logprobs", "erased_at", "source_id", "attribution"} & wire.keys()
    for prompt, completion in ((7, None), (None, 7)):
        counted = row._replace(prompt_tokens=prompt, completion_tokens=completion)
        wire = plain(result_to_wire(counted, model_ready=True))
        assert wire["usage"] == {"prompt_tokens": prompt, "completion_tokens": completion}


@pytest.mark.parametrize(
    ("started", "cancelled", "finished", "updated"),
    [(None, None, None, None), (1, None, None, 1), (1, 2, None, 2), (2, 1, None, 2), (1, 2, 3, 3)],
)
def test_the_last_change_of_a_result(
    started: int | None, cancelled: int | None, finished: int | None, updated: int | None
) -> None:
    times = [
        None if one is None else START + timedelta(one) for one in (started, cancelled, finished)
    ]
    row = result_row(started_at=times[0], cancel_requested_at=times[1], finished_at=times[2])
    expected = created_at(row.id) if updated is None else START + timedelta(updated)
    assert result_to_wire(row, model_ready=True)["updated_at"] == expected


def test_an_attribution_and_its_source_name_each_other() -> None:
    identifier, source = str(new_id()), new_id()
    following = orjson.dumps({"id": identifier, "queue": "infini-gram/corpus"}).decode()
    for state, found in (("completed", identifier), ("failed", None), ("pending", None)):
        row = result_row(attribution=following, state=state)
        wire = result_to_wire(row, model_ready=True)
        assert wire["attribution"] == {"index": "corpus", "id": found}
    row = result_row(kind="attribution", output='{"spans": []}', source_id=source)
    wire = plain(result_to_wire(row, model_ready=True))
    assert (wire["source_id"], wire["result"]) == (str(source), {"spans": []})
    wire = plain(result_to_wire(row._replace(output=None), model_ready=True))
    assert wire["result"] is None


def test_a_context_never_changes_unless_it_is_erased() -> None:
    context = Context(new_id(), "text", None, {"a": 1}, None)
    created = created_at(context.id)
    assert context_to_wire(context) == {
        "id": str(context.id), "content": "text", "messages": None, "metadata": {"a": 1},
        "created_at": created, "updated_at": created,
    }  # fmt: skip
    erased = Context(context.id, "", None, {}, START)
    assert context_to_wire(erased)["erased_at"] == START


def test_the_present_attempt_is_the_last_of_the_history() -> None:
    worker = new_id()
    history = '[{"attempt": 1, "error": null}, {"attempt": 2, "error": null, "continued_from": 5}]'
    row = AttemptsRow(history, 3, "pending", worker, START, None, None, None, 7)
    past = [
        {"continued_from": None, "attempt": 1, "error": None},
        {"continued_from": 5, "attempt": 2, "error": None},
    ]
    present = {
        "attempt": 3, "worker_id": str(worker), "started_at": START, "ended_at": None,
        "counted": False, "continued_from": 7, "error": None,
    }  # fmt: skip
    assert attempts_to_wire(row) == [*past, present]
    ended = AttemptsRow(history, 3, "failed", worker, START, START, "cancelled", "Cancelled.", 7)
    error = {"code": "cancelled", "message": "Cancelled."}
    changed = {"ended_at": START, "counted": True, "error": error}
    assert attempts_to_wire(ended) == [*past, present | changed]
    for lacking in (
        AttemptsRow(history, 3, "pending", None, START, None, None, None, 7),  # between two
        AttemptsRow(history, 2, "pending", worker, START, None, None, None, 7),  # is in the history
    ):
        assert attempts_to_wire(lacking) == past
