"""OpenAI's responses: requests to conversations, results to responses.

https://platform.openai.com/docs/api-reference/responses. A request becomes a chat completion's, which
has messages, tools and parameters; the members that a response echoes are stored with the result.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from app.api.json_codec import to_field_errors
from app.api.openai.batches_schemas import OpenAIMetadata, from_wire_id, to_wire_id
from app.api.openai.chat_schemas import ChatRequest, ToolUse, chat_message, token_logprobs
from app.api.openai.schemas import OpenAIRequest, Refused, created
from app.core.bounded_json import check_json
from app.core.errors import FailureCode, InvalidRequestError, NotFoundError
from app.core.ids import new_id
from app.inference.sampling import MAX_TOKENS
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from app.inference.tool_calls import NamedReader, Reader, ToolFormat, reader_of, reader_of_forced
from app.results.rows import ResultRow

_STRICT = ConfigDict(strict=True, extra="ignore")
_LOGPROBS = "message.output_text.logprobs"
_MAX_ITEMS = 10_000
_TEXT_PARTS = ("input_text", "output_text", "text")


def _error(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


# --- Requests -------------------------------------------------------------------------------------


def _read_input(value: Any) -> list[dict[str, Any]]:
    """The input as items, each with an id, as `input_items` returns them."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_ITEMS:
        raise _error(f"must be a text, or a list of 1 to {_MAX_ITEMS} items")
    return [item for place, given in enumerate(value) if (item := _read_item(place, given))]


def _read_item(place: int, given: Any) -> dict[str, Any] | None:
    """Validate an item; None for one that the model does not receive."""
    if not isinstance(given, dict):
        raise _error(f"item {place} must be an object")
    kind = given.get("type", "message" if "role" in given else None)
    if kind == "message":
        return _read_message(place, given)
    if kind == "function_call":
        names = ("call_id", "name", "arguments")
        return _with_id("fc_", given) | {"type": kind} | _texts(place, given, names)
    if kind == "function_call_output":
        output = {
            "call_id": _text(place, given, "call_id"),
            "output": _join(place, given, "output"),
        }
        return _with_id("fco_", given) | {"type": kind} | output
    if kind == "reasoning":
        return None  # another model's reasoning
    raise _error(
        f"item {place} is of type {str(kind)[:40]!r}; message, function_call and "
        "function_call_output are supported"
    )


def _read_message(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise _error(f"item {place} must have the role user, assistant, system or developer")
    kind = "output_text" if role == "assistant" else "input_text"
    content: dict[str, Any] = {"type": kind, "text": _join(place, given, "content")}
    if role == "assistant":
        content["annotations"] = []
    return _with_id("msg_", given) | {"type": "message", "role": role, "content": [content]}


def _join(place: int, given: Mapping[str, Any], name: str) -> str:
    """A text, or parts joined as its lines."""
    content = given.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(f"item {place} needs {name}: a text, or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise _error(
                f"item {place} has a part of type {str(kind)[:40]!r}: only text is supported"
            )
        texts.append(text)
    return "\n".join(texts)


def _with_id(prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    identifier = given.get("id")
    is_id = isinstance(identifier, str) and 0 < len(identifier) <= 256
    return {"id": identifier if is_id else to_wire_id(prefix, new_id()), "status": "completed"}


def _texts(place: int, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {name: _text(place, given, name) for name in names}


def _text(place: int, given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _error(f"item {place} needs {name}, a text")
    return value


class ResponseFunction(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


# Responses echo both unchanged. A schema in the format has further bounds of its own.
_Format = Annotated[
    dict[str, JsonValue],
    AfterValidator(
        lambda value: check_json(
            value, max_bytes=2 * MAX_SCHEMA_BYTES, max_depth=MAX_SCHEMA_DEPTH + 2
        )
    ),
]
_Choice = Annotated[
    JsonValue, AfterValidator(lambda value: check_json(value, max_bytes=16_384, max_depth=16))
]


class TextOptions(BaseModel):
    """Format of the text."""

    model_config = _STRICT

    format: _Format | None = Field(
        None, description="`text`, `json_object`, or `json_schema` with `name` and `schema`."
    )
    verbosity: str | None = Field(None, description="Ignored.")


class ResponseStreamOptions(BaseModel):
    model_config = _STRICT

    include_obfuscation: bool | None = Field(None, description="Ignored.")


class Reasoning(BaseModel):
    """The model's reasoning effort."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Given to the model's template."
    )


_INPUT_SCHEMA = str | list[dict[str, JsonValue]]


class ResponseCreate(OpenAIRequest):
    input: Annotated[
        list[dict[str, Any]], PlainValidator(_read_input, json_schema_input_type=_INPUT_SCHEMA)
    ]
    instructions: Annotated[str, Field(max_length=2_000_000)] | None = Field(
        None, description="The system message; not carried over to the next response."
    )
    previous_response_id: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Continue the conversation of this response."
    )
    background: bool | None = Field(None, description="Respond at once; the model continues.")
    store: bool | None = Field(
        None, description="false: the texts are erased once they are delivered."
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    metadata: OpenAIMetadata | None = Field(  # type: ignore[assignment] # narrower, never written
        None, description="Kept with the response."
    )
    text: TextOptions | None = None
    tools: Annotated[list[ResponseFunction], Field(max_length=128)] | None = None
    tool_choice: _Choice = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = Field(
        None, description=f"`{_LOGPROBS}`; others are ignored."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning: Reasoning | None = None
    service_tier: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored.")
    max_tool_calls: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Ignored: there are no built-in tools."
    )
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment] # another one
    truncation: Literal["disabled"] | None = Field(
        None, description="Input that exceeds the model's length is rejected."
    )

    n: None = Field(None, description="Not supported: a response is one.")
    conversation: Refused = Field(None, description="Not supported: use previous_response_id.")
    prompt: Refused = Field(None, description="Not supported: there are no stored prompts.")
    context_management: Refused = Field(None, description="Not supported.")

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def to_chat(self) -> ChatRequest:
        """Convert to a chat completion's request. Raises InvalidRequestError."""
        chat: dict[str, Any] = {
            name: getattr(self, name) for name in self.model_fields_set & _SAME
        } | {"model": self.model, "messages": self._messages(), "metadata": self.metadata}
        if self.has_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        chat["max_completion_tokens"] = self.max_output_tokens
        if self.text and self.text.format:
            chat["response_format"] = _to_response_format(self.text.format)
        if self.tools:
            chat["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude_none=True)}
                for tool in self.tools
            ]
        chat["tool_choice"] = _to_tool_choice(self.tool_choice)
        if self.reasoning and self.reasoning.effort:
            chat["reasoning_effort"] = self.reasoning.effort
        try:
            return ChatRequest.model_validate(chat)
        except ValidationError as error:
            raise InvalidRequestError(
                "The request is not valid.", to_field_errors(error.errors())
            ) from error

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item["type"] == "message":
                messages.append({"role": item["role"], "content": item["content"][0]["text"]})
            elif item["type"] == "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
                )
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages

    def to_stored(self, use: ToolUse | None) -> str:
        """Serialize the members that later responses echo, as JSON text."""
        calls = None
        if use is not None:
            choice = _to_tool_choice(self.tool_choice)
            named = choice["function"]["name"] if isinstance(choice, dict) else None
            calls = {
                "format": use.tool_format,
                "is_forced": choice == "required",
                "name": named,
                "is_parallel": use.is_parallel,
            }
        stored = {
            "dialect": _DIALECT,
            "background": bool(self.background),
            "is_stored": self.store is not False,
            "has_instructions": bool(self.instructions),
            "logprobs": (self.top_logprobs or 0) if self.has_logprobs else None,
            "calls": calls,
            "input": self.input,
            "echo": self._echo(),
        }
        return orjson.dumps(stored).decode()

    def _echo(self) -> dict[str, Any]:
        text = self.text.format if self.text and self.text.format else {"type": "text"}
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {
                "effort": self.reasoning.effort if self.reasoning else None,
                "summary": None,
            },
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": text},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


_DIALECT = "responses"
# Members with the same name and meaning in a chat completion.
_SAME = (
    OpenAIRequest.model_fields.keys() & ChatRequest.model_fields.keys()
    - {"model", "metadata", "stream", "stream_options", "store", "n", "user"}
) | {"parallel_tool_calls"}  # fmt: skip


def _to_response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return dict(given)
    return {
        "type": "json_schema",
        "json_schema": {key: given[key] for key in given if key != "type"},
    }


def _to_tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function" and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


# --- Stored requests ------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Stored:
    """Stored members of a response's request."""

    echo: dict[str, Any]
    input: list[dict[str, Any]]
    background: bool
    is_stored: bool
    has_instructions: bool
    logprobs: int | None
    use: ToolUse | None

    @classmethod
    def of(cls, request: str | None) -> "Stored | None":
        """Parse them; None for a result that is not a response."""
        if request is None:
            return None
        members = orjson.loads(request)
        if members.pop("dialect", None) != _DIALECT:
            return None
        return cls(use=_to_use(members.pop("calls")), **members)


def _to_use(calls: Mapping[str, Any] | None) -> ToolUse | None:
    if calls is None:
        return None
    tool_format = ToolFormat(calls["format"]) if calls["format"] else None

    def new_reader() -> Reader:
        if calls["name"] is not None:
            return NamedReader(calls["name"])
        if calls["is_forced"] or tool_format is None:
            return reader_of_forced()
        return reader_of(tool_format)

    return ToolUse(
        new_reader,
        tool_format,
        {},
        is_named=calls["name"] is not None,
        is_parallel=calls["is_parallel"],
    )


def to_response_id(result_id: UUID) -> str:
    return to_wire_id("resp_", result_id)


def from_response_id(text: str) -> UUID:
    """The result's id. Raises NotFoundError."""
    return from_wire_id("resp_", text, "response")


def stored_of(row: ResultRow) -> Stored:
    """The stored request. Raises NotFoundError for other results, and for responses that are not stored."""
    stored = Stored.of(row.request)
    if stored is None or not stored.is_stored:
        raise NotFoundError(f"There is no response {to_response_id(row.id)!r}.")
    return stored


# --- Responses ------------------------------------------------------------------------------------

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseRead(BaseModel):
    """A response, in any state."""

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


class InputItemListRead(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def status_of(row: ResultRow) -> Status:
    if row.state == "pending":
        return "in_progress" if row.started_at is not None else "queued"
    if row.state == "completed":
        return "incomplete" if row.finish_reason == "length" else "completed"
    return "cancelled" if row.error_code == FailureCode.CANCELLED else "failed"


def response_to_wire(stored: Stored, row: ResultRow) -> dict[str, Any]:
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


def bare_response(stored: Stored, result_id: UUID, status: Status) -> dict[str, Any]:
    """A response without output."""
    return {
        "id": to_response_id(result_id),
        "object": "response",
        "created_at": created(result_id),
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


def output_of(stored: Stored, row: ResultRow, status: Status) -> list[dict[str, Any]]:
    """The output of a terminal result, as items."""
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
            and _read_arguments(call["function"]["arguments"]) is None
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


def answer_message(stored: Stored, row: ResultRow) -> dict[str, Any]:
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
                    "arguments": _read_arguments(call["function"]["arguments"]) or {},
                },
            }
            for call in calls
        ]
    return answer


_MAX_DEPTH = 64  # of arguments
_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")


def _read_arguments(text: str) -> dict[str, Any] | None:
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
        "id": to_wire_id("msg_", result_id),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def page_of(
    items: Sequence[dict[str, Any]], *, after: str | None, limit: int, order: str
) -> Iterator[dict[str, Any]]:
    """Up to `limit` + 1 items after the one with the id `after`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise NotFoundError(f"There is no input item {after[:100]!r}.")
        ordered = ordered[places[0] + 1 :]
    yield from ordered[: limit + 1]
