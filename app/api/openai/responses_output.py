"""Responses and their output items, from results."""

from collections.abc import Sequence
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from app.api.openai.batches_schemas import ListRead
from app.api.openai.chat_responses import token_logprobs
from app.api.openai.stored_responses import StoredRequest, to_response_id
from app.api.openai.tool_forms import custom_input
from app.api.tool_arguments import EarlierCall, earlier_calls, parse_arguments, to_storable
from app.core.errors import FailureCode, NotFoundError
from app.core.ids import unix_seconds
from app.inference.tool_calls import ToolCall, call_id
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
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int


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
    wire["usage"] = _usage(stored, row)
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


def _usage(stored: StoredRequest, row: ResultRow) -> dict[str, Any] | None:
    prompt, completion = row.prompt_tokens, row.completion_tokens
    if prompt is None or completion is None:
        return None
    # The dialect requires the details and forbids null in them.
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": stored.rules.reasoning_tokens(row) or 0},
        "total_tokens": prompt + completion,
    }


def output_of(stored: StoredRequest, row: ResultRow, status: Status) -> list[dict[str, Any]]:
    """The items in the order of the text; reasoning behind the first content is one item more."""
    output = stored.rules.read(row.text)
    has_reasoning = bool(output.reasoning or output.late_reasoning)
    state = "completed" if status == "completed" else "incomplete"
    items = []
    if output.reasoning:
        is_over = bool(output.content or output.calls)
        status_of_reasoning = "completed" if is_over else state
        items.append(reasoning_item(row.id, status_of_reasoning, output.reasoning))
    is_expected = row.state == "completed" and not output.calls and not has_reasoning
    if output.content or is_expected:
        part = text_part(output.content)
        if stored.logprobs is not None:
            tokens = row.token_logprobs()
            # Null would be no list, which the dialect requires.
            part["logprobs"] = token_logprobs(tokens, stored.logprobs, no_bytes=[])
        items.append(message_item(row.id, state, [part]))
    if output.late_reasoning:
        items.append(reasoning_item(row.id, state, output.late_reasoning, number=1))
    for place, call in enumerate(output.calls):
        is_last = place == len(output.calls) - 1
        items.append(_call_item(stored, row.id, place, call, is_last and state == "incomplete"))
    return items


def _call_item(
    stored: StoredRequest, result_id: UUID, place: int, call: ToolCall, may_be_cut: bool
) -> dict[str, Any]:
    is_cut = may_be_cut and parse_arguments(call.arguments) is None
    use = stored.rules.tools
    form = use.forms.get(call.name) if use else None
    is_custom = form is not None and form.is_custom
    prefix, kind = ("ctc_", "custom_tool_call") if is_custom else ("fc_", "function_call")
    item = {
        "id": f"{prefix}{result_id.hex}{place}",
        "type": kind,
        "status": "incomplete" if is_cut else "completed",
        "call_id": call_id(use.tool_format if use else None, result_id, place),
        "name": form.name if form else call.name,
    }
    if form is not None and form.namespace is not None:
        item["namespace"] = form.namespace
    if is_custom:
        return item | {"input": custom_input(call.arguments)}
    return item | {"arguments": call.arguments}


def answer_message(
    stored: StoredRequest, row: ResultRow, reasoning_members: Sequence[str] = ()
) -> dict[str, Any]:
    """A completed response as the assistant's message, for chat templates.

    The reasoning is in those members that the template has for it.
    """
    output = stored.rules.read(row.text)
    tool_format = stored.rules.tools.tool_format if stored.rules.tools else None
    calls = [
        EarlierCall(call_id(tool_format, row.id, place), call.name, call.arguments)
        for place, call in enumerate(output.calls)
    ]
    answer = {"role": "assistant"} | earlier_calls(to_storable(output.content), calls)
    if reasoning := output.reasoning + output.late_reasoning:
        answer |= dict.fromkeys(reasoning_members, to_storable(reasoning))
    return answer


def reasoning_item(
    result_id: UUID, status: str, text: str | None, number: int = 0
) -> dict[str, Any]:
    """Reasoning as the model wrote it; None: it has just begun. `number` counts a result's items."""
    return {
        "id": f"rs_{result_id}" if not number else f"rs_{result_id}_{number}",
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [] if text is None else [reasoning_part(text)],
    }


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


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
