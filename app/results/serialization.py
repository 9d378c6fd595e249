"""Contexts and results as JSON members: the native API's form, which webhooks and exports send too."""

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


def result_to_wire(row: ResultRow, *, model_ready: bool) -> dict[str, Any]:
    created = created_at(row.id)
    started, cancelled, finished = row.started_at, row.cancel_requested_at, row.finished_at
    error = None
    if row.error_code is not None:
        error = {
            "code": row.error_code,
            "message": row.error_message,
            "retryable": row.error_retryable,
        }
    usage = None
    if row.completion_tokens is not None or row.prompt_tokens is not None:
        usage = {
            "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens,
        }
    result: str | orjson.Fragment | None = row.output
    if row.kind == "attribution":
        result = orjson.Fragment(row.output) if row.output else None
    wire = {
        "id": str(row.id),
        "kind": row.kind,
        "context_id": str(row.context_id),
        "model_name": row.model_name,
        "model_version": row.model_version,
        "model_ready": model_ready,
        "state": row.state,
        "result": result,
        "error": error,
        "finish_reason": row.finish_reason,
        "parameters": orjson.Fragment(row.parameters),
        "usage": usage,
        "attempt": row.attempt,
        "continued": row.continuations,
        "cancel_requested_at": cancelled,
        "created_at": created,
        "updated_at": finished or max(filter(None, (created, started, cancelled))),
        "started_at": started,
        "first_token_at": row.first_token_at,
        "finished_at": finished,
        "metadata": orjson.Fragment(row.metadata),
        "retry_of": row.retry_of and str(row.retry_of),
        "queue_position": None,
        "estimated_wait_seconds": None,
    }
    if row.logprobs is not None:
        wire["logprobs"] = orjson.Fragment(row.logprobs)
    if row.erased_at is not None:
        wire["erased_at"] = row.erased_at
    if row.source_id is not None:
        wire["source_id"] = str(row.source_id)
    if row.attribution is not None:
        is_there = row.state == "completed"
        wire["attribution"] = _following_to_wire(row.attribution, is_there=is_there)
    return wire


def _following_to_wire(stored: str, *, is_there: bool) -> dict[str, Any]:
    following = orjson.loads(stored)
    identifier = following["id"] if is_there else None
    return {"index": index_of(following["queue"]), "id": identifier}


def accepted_to_wire(result: NewResult, *, model_ready: bool) -> dict[str, Any]:
    """A result that was just accepted, without reading it back."""
    created = created_at(result.id)
    wire: dict[str, Any] = {
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
    if result.source_id is not None:
        wire["source_id"] = str(result.source_id)
    if result.attribution is not None:
        wire["attribution"] = _following_to_wire(result.attribution, is_there=False)
    return wire


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
