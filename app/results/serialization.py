"""Contexts and results as JSON members: the native API's form, which webhooks and exports send too."""

from datetime import datetime
from typing import Any

import orjson

from app.core.ids import created_at
from app.core.queue_names import index_of
from app.queue.enqueue import NewResult
from app.results.contexts import Context
from app.results.rows import AttemptsRow, ResultRow


def context_to_wire(context: Context) -> dict[str, Any]:
    """A context as JSON members; it never changes, so both times are its creation."""
    created = created_at(context.id)
    wire: dict[str, Any] = {
        "id": str(context.id),
        "content": context.content,
        "messages": context.messages,
        "metadata": context.metadata,
        "created_at": created,
        "updated_at": created,
    }
    if context.erased_at is not None:
        wire["erased_at"] = context.erased_at
    return wire


def accepted_to_wire(result: NewResult, *, model_ready: bool) -> dict[str, Any]:
    """A result that was just accepted, without reading it back."""
    wire = _new_to_wire(result, created_at(result.id), model_ready=model_ready)
    _add_references(wire, result, is_completed=False)
    return wire


def _numbers_to_wire(kind: str, numbers: list[float]) -> dict[str, Any]:
    if kind == "embedding":
        return {"embedding": numbers}
    return {"score": numbers[0]} if len(numbers) == 1 else {"scores": numbers}


def result_to_wire(row: ResultRow, *, model_ready: bool) -> dict[str, Any]:
    created = created_at(row.id)
    started, cancelled, finished = row.started_at, row.cancel_requested_at, row.finished_at
    wire = _new_to_wire(row, created, model_ready=model_ready)
    wire["state"] = row.state
    if row.kind == "generation":
        wire["result"] = row.output
    elif row.vector is not None:
        wire["result"] = _numbers_to_wire(row.kind, row.numbers())
    elif row.output:
        wire["result"] = orjson.Fragment(row.output)
    if row.error_code is not None:
        wire["error"] = {
            "code": row.error_code,
            "message": row.error_message,
            "retryable": row.error_retryable,
        }
    wire["finish_reason"] = row.finish_reason
    if row.completion_tokens is not None or row.prompt_tokens is not None:
        wire["usage"] = {
            "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens,
        }
    wire["attempt"] = row.attempt
    wire["continued"] = row.continuations
    wire["cancel_requested_at"] = cancelled
    wire["updated_at"] = finished or max(filter(None, (created, started, cancelled)))
    wire["started_at"] = started
    wire["first_token_at"] = row.first_token_at
    wire["finished_at"] = finished
    if row.logprobs is not None:
        wire["logprobs"] = orjson.Fragment(row.logprobs)
    if row.prompt_logprobs is not None:
        wire["prompt_logprobs"] = orjson.Fragment(row.prompt_logprobs)
    if row.erased_at is not None:
        wire["erased_at"] = row.erased_at
    _add_references(wire, row, is_completed=row.state == "completed")
    return wire


def _new_to_wire(
    result: NewResult | ResultRow, created: datetime, *, model_ready: bool
) -> dict[str, Any]:
    """A pending result that no worker has claimed; JSON columns are passed through as stored."""
    return {
        "id": str(result.id),
        "kind": result.kind,
        "context_id": str(result.context_id),
        "model_name": result.model_name,
        "model_version": result.model_version,
        "model_ready": model_ready,
        "state": "pending",
        "result": None,
        "error": None,
        "finish_reason": None,
        "parameters": orjson.Fragment(result.parameters),
        "usage": None,
        "attempt": 0,
        "continued": 0,
        "cancel_requested_at": None,
        "created_at": created,
        "updated_at": created,
        "started_at": None,
        "first_token_at": None,
        "finished_at": None,
        "metadata": orjson.Fragment(result.metadata),
        "retry_of": result.retry_of and str(result.retry_of),
        "queue_position": None,
        "estimated_wait_seconds": None,
    }


def _add_references(
    wire: dict[str, Any], result: NewResult | ResultRow, *, is_completed: bool
) -> None:
    """The source of a reused text or of an attribution, and the attribution that follows."""
    if isinstance(result, ResultRow) and result.reused_from is not None:
        wire["reused"] = True
        wire["reused_from"] = str(result.reused_from)
    if result.source_id is not None:
        wire["source_id"] = str(result.source_id)
    if result.attribution is not None:
        following = orjson.loads(result.attribution)
        identifier = following["id"] if is_completed else None
        wire["attribution"] = {"index": index_of(following["queue"]), "id": identifier}


def attempts_to_wire(row: AttemptsRow) -> list[dict[str, Any]]:
    """The history of a result's attempts, with the present or last one at the end."""
    history: list[dict[str, Any]] = [
        {"continued_from": None} | entry for entry in orjson.loads(row.attempt_history)
    ]
    attempt = row.attempt
    if row.worker_id is not None and not any(item["attempt"] == attempt for item in history):
        error = None
        if row.error_code is not None:
            error = {"code": row.error_code, "message": row.error_message}
        history.append(
            {
                "attempt": attempt,
                "worker_id": str(row.worker_id),
                "started_at": row.started_at,
                "ended_at": row.finished_at,
                "counted": row.state != "pending",
                "continued_from": row.continued_from,
                "error": error,
            }
        )
    return history
