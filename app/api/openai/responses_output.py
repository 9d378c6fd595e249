"""Responses and their output items, from results."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from app.api.openai.batches_schemas import ListRead
from app.api.openai.chat_responses import chat_message, token_logprobs
from app.api.openai.stored_responses import StoredRequest, to_response_id
from app.core.errors import FailureCode, NotFoundError
from app.core.ids import unix_seconds
from app.results.rows import ResultRow

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseRead(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    model: str
    metadata: dict[str, str]
    background: bool
    previous_response_id: str | None


class InputItemListRead(ListRead):
    data: list[dict[str, Any]]


def status_of(row: ResultRow) -> Status:
    if row.state == "pending":
        return "in_progress" if row.started_at is not None else "queued"
    if row.state == "completed":
        return "incomplete" if row.finish_reason == "length" else "completed"
    return "cancelled" if row.error_code == FailureCode.CANCELLED else "failed"


def response_to_wire(stored: StoredRequest, row: ResultRow) -> dict[str, Any]:
    status = status_of(row)
    wire = bare_response(stored, row.id, status)
    if row.state == "pending":
        return wire
    assert row.finished_at is not None
    wire["completed_at"] = int(row.finished_at.timestamp())
    wire["output"] = output_of(stored, row, status)
    wire["usage"] = _usage(row)
    if status == "incomplete":
        wire["incomplete_details"] = {"reason": "max_output_tokens"}
    elif status == "failed":
        is_clients = row.error_code == FailureCode.INVALID_REQUEST
        wire["error"] = {
            "code": "invalid_prompt" if is_clients else "server_error",
            "message": row.error_message,
            "type": row.error_code,
        }
    return wire


def bare_response(stored: StoredRequest, result_id: UUID, status: Status) -> dict[str, Any]:
    return {
        "id": to_response_id(result_id),
        "object": "response",
        "created_at": int(unix_seconds(result_id)),
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **stored.echo,
    }


def _usage(row: ResultRow) -> dict[str, Any] | None:
    prompt, completion = row.prompt_tokens, row.completion_tokens
    if prompt is None or completion is None:
        return None
    # The dialect requires the details and forbids null in them; the engine returns none.
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def output_of(stored: StoredRequest, row: ResultRow, status: Status) -> list[dict[str, Any]]:
    message, _ = chat_message(stored.use, row)
    is_whole = status == "completed"
    items = []
    if message["content"] or (message["content"] is not None and row.state == "completed"):
        part = text_part(message["content"])
        if stored.logprobs is not None:
            part["logprobs"] = token_logprobs(row.token_logprobs(), stored.logprobs)
        state = "completed" if is_whole else "incomplete"
        items.append(message_item(row.id, state, [part]))
    calls = message.get("tool_calls", ())
    for place, call in enumerate(calls):
        is_cut = (
            not is_whole
            and place == len(calls) - 1
            and _parse_arguments(call["function"]["arguments"]) is None
        )
        items.append(
            {
                "id": f"fc_{row.id.hex}{place}",
                "type": "function_call",
                "status": "incomplete" if is_cut else "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return items


def answer_message(stored: StoredRequest, row: ResultRow) -> dict[str, Any]:
    """A completed response as the assistant's message, for chat templates.

    Models do not keep to the bounds of requests, and may be cut within a call: invalid arguments become
    none.
    """
    message, _ = chat_message(stored.use, row)
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": _to_storable(message["content"] or ""),
    }
    if calls := message.get("tool_calls"):
        answer["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": _to_storable(call["function"]["name"]),
                    "arguments": _parse_arguments(call["function"]["arguments"]) or {},
                },
            }
            for call in calls
        ]
    return answer


_MAX_DEPTH = 64  # of arguments
_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")


def _parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse arguments that a model wrote, for storage; None unless they are a JSON object."""
    try:
        value = _to_storable(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _to_storable(value: Any, depth_left: int = _MAX_DEPTH) -> Any:
    """Make JSON storable: no NUL, no half of a surrogate pair, no number beyond JSON's or 64 bits.

    Raises ValueError if it is nested too deep.
    """
    if isinstance(value, str):
        return _NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict | list) and not depth_left:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        return {
            _to_storable(key): _to_storable(member, depth_left - 1) for key, member in value.items()
        }
    if isinstance(value, list):
        return [_to_storable(member, depth_left - 1) for member in value]
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if (isinstance(value, float) and not math.isfinite(value)) or (
        is_int and not -(2**63) <= value < 2**63
    ):
        return str(value)
    return value


def message_item(result_id: UUID, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{result_id}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def page_of(
    items: Sequence[dict[str, Any]], *, after: str | None, limit: int, order: str
) -> list[dict[str, Any]]:
    """Up to `limit` + 1 items after the one with the id `after`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise NotFoundError(f"There is no input item {after[:100]!r}.")
        ordered = ordered[ids.index(after) + 1 :]
    return ordered[: limit + 1]
