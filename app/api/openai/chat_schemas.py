"""OpenAI's chat completions: requests to messages and parameters, results to choices and chunks.

https://platform.openai.com/docs/api-reference/chat
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self
from uuid import UUID

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from app.api.logprobs import logprob_of
from app.api.openai.schemas import (
    SYSTEM_FINGERPRINT,
    OpenAIRequest,
    Refused,
    created,
    invalid,
    likeliest,
    sampled_of,
    usage_of,
)
from app.core.bounded_json import check_json
from app.inference.prompts import PromptFormat
from app.inference.sampling import MAX_TOKENS
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, check_schema, read_schema_text
from app.inference.tool_calls import (
    NamedReader,
    Piece,
    Reader,
    ToolCall,
    ToolFormat,
    call_id,
    read_all,
    reader_of,
    reader_of_forced,
)
from app.results.requests import MAX_PROMPT_CHARACTERS, SendOptions
from app.results.rows import ResultRow

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
# Template variables that requests set by other members.
_OWN_VARIABLES = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template",
}  # fmt: skip

_ARGUMENTS_DEPTH = 64
_ESCAPE = re.compile(r"\\(?:u0000|.)", re.DOTALL)  # in JSON; `\\u0000` after a backslash is none

_STRICT = ConfigDict(strict=True, extra="ignore")


def _error(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


# --- Messages -------------------------------------------------------------------------------------


def _join_parts(content: Any) -> Any:
    """Join content parts as lines of one text, as vLLM does for text templates."""
    if not isinstance(content, list):
        return content
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in ("text", "refusal"):
            raise _error(f"part {place} is of type {str(kind)[:40]!r}; only text is supported")
        if not isinstance(text, str):
            raise _error(f"part {place} has no text")
        texts.append(text)
    return "\n".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    BeforeValidator(_join_parts),
    Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


def _read_arguments(text: str) -> str:
    """Check that a text is the JSON of an object. A model may have written NUL, which cannot be
    stored; U+FFFD replaces it.
    """
    text = _ESCAPE.sub(lambda found: "\\ufffd" if found[0] == "\\u0000" else found[0], text)
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError as error:
        raise _error(f"must be the JSON text of an object: {error}") from None
    if not isinstance(value, dict):
        raise _error("must be the JSON text of an object")
    check_json(value, max_bytes=MAX_PROMPT_CHARACTERS, max_depth=_ARGUMENTS_DEPTH)
    return text


class CalledFunction(BaseModel):
    model_config = _STRICT

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, AfterValidator(_read_arguments)] = "{}"


class AssistantToolCall(BaseModel):
    """A call in an earlier message of the assistant."""

    model_config = _STRICT

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[AssistantToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    audio: Refused = Field(None, description="Not supported.")
    function_call: Refused = Field(None, description="Not supported: use tool_calls.")

    @model_validator(mode="after")
    def _has_its_members(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise _error("only assistant messages have tool_calls")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise _error("has no content")
        return self

    def to_template(self, *, knows_developer: bool) -> dict[str, Any]:
        """The message for templates: arguments of calls as objects, as in transformers."""
        role = self.role
        if role == "developer" and not knows_developer:
            role = "system"  # its older name
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": orjson.loads(call.function.arguments or "{}"),
                    },
                }
                for call in self.tool_calls
            ]
        return message


# --- Tools and formats ----------------------------------------------------------------------------


def _check_parameters(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _error("must be a JSON schema of an object")
    return check_schema(value)


class Function(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)] | None = None
    parameters: Annotated[dict[str, JsonValue], BeforeValidator(_check_parameters)] | None = None


class Tool(BaseModel):
    """A function with a JSON schema of its arguments."""

    model_config = _STRICT

    type: Literal["function"]
    function: Function


def _read_choice(value: Any) -> Any:
    """`none`, `auto`, `required`, or the function's name in a list of one."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    # TGI's clients leave the type out.
    if isinstance(value, dict) and value.get("type", "function") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return [function["name"]]
    raise _error("must be `none`, `auto`, `required` or a function by its name")


ToolChoice = Annotated[
    Any,
    PlainValidator(
        _read_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | dict[str, JsonValue] | None,
    ),
]


def _read_format(value: Any) -> Any:
    """The constraint of a response_format; None for plain text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    given = value.get("value") if isinstance(value, dict) else None  # TGI's member
    if kind == "json_object" and given is None:
        return {"json_object": True}
    if kind in ("json", "json_object"):
        given = read_schema_text(given)
        if not isinstance(given, dict):
            raise _error("value must be a JSON schema")
        return {"json": check_schema(given)}
    if kind == "regex":
        if not isinstance(given, str) or not 0 < len(given) <= MAX_SCHEMA_BYTES:
            raise _error(
                f"value must be a regular expression of 1 to {MAX_SCHEMA_BYTES} characters"
            )
        return {"regex": given}
    if kind != "json_schema":
        raise _error("must be of type `text`, `json_object` or `json_schema`")
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise _error("json_schema.schema must be a JSON schema")
    return {"json": check_schema(schema)}


ResponseFormat = Annotated[
    Any, PlainValidator(_read_format, json_schema_input_type=dict[str, JsonValue] | None)
]


def _check_variables(value: dict[str, Any]) -> dict[str, Any]:
    if own := sorted(_OWN_VARIABLES & value.keys()):
        raise _error(f"{own[0]} is no variable of yours")
    checked: dict[str, Any] = check_json(value, max_bytes=16_384, max_depth=16)
    return checked


Documents = Annotated[
    list[dict[str, JsonValue]],
    Field(max_length=1000),
    AfterValidator(lambda value: check_json(value, max_bytes=2_000_000, max_depth=16)),
]


class ChatRequest(OpenAIRequest):
    """A conversation to continue."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description="The older name of max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None,
        description="The default is LLM_DEFAULT_MAX_TOKENS, or what the model's length leaves.",
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Given to the model's template."
    )

    add_generation_prompt: bool | None = Field(None, description="vLLM's; the default is true.")
    continue_final_message: bool | None = Field(
        None, description="vLLM's: continue the last message."
    )
    chat_template_kwargs: (
        Annotated[dict[str, JsonValue], AfterValidator(_check_variables)] | None
    ) = Field(None, description="vLLM's: further variables of the model's template.")
    documents: Documents | None = Field(None, description="vLLM's: given to the template.")

    functions: Refused = Field(None, description="Not supported: use tools.")
    function_call: Refused = Field(None, description="Not supported: use tool_choice.")
    audio: Refused = Field(None, description="Not supported.")
    web_search_options: Refused = Field(None, description="Not supported.")
    chat_template: Refused = Field(None, description="Not supported: the model has its own.")
    echo: Refused = Field(None, description="Not supported.")
    modalities: list[str] | None = Field(None, description="Only text.")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.modalities and set(self.modalities) != {"text"}:
            raise _error("modalities can only be text")
        if self.top_logprobs and not self.logprobs:
            raise _error("top_logprobs needs logprobs to be true")
        return self

    def to_messages(self, prompt_format: PromptFormat | None) -> list[dict[str, Any]]:
        knows_developer = prompt_format is not None and prompt_format.knows_developer
        return [one.to_template(knows_developer=knows_developer) for one in self.messages]

    def to_template_arguments(self) -> dict[str, Any]:
        """Further template variables; only those that the request sets."""
        arguments: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        arguments |= self.chat_template_kwargs or {}
        if self.tools and self.tool_choice != "none":
            arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.documents is not None:
            arguments["documents"] = self.documents
        if self.add_generation_prompt is not None:
            arguments["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        return arguments

    def to_send_options(self, use: "ToolUse | None") -> SendOptions:
        """Options of the results. Raises InvalidRequestError."""
        given: dict[str, Any] = {}
        max_tokens = self.max_completion_tokens or self.max_tokens
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.response_format is not None:
            if use is not None:
                raise invalid(
                    "response_format", "cannot be combined with tools; send tool_choice none"
                )
            given["structured_outputs"] = self.response_format
        if use is not None:
            given |= use.sampling
        return self.to_options(given)


# --- Tool calls -----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class ToolUse:
    """Rules to parse the tool calls in one request's results."""

    new_reader: Callable[[], Reader]
    tool_format: ToolFormat | None
    sampling: dict[str, Any]  # parameters that force a call, or keep its markers in the text
    is_named: bool = False
    is_parallel: bool = True

    def finish_reason(self, reason: str | None, calls: int) -> str | None:
        """OpenAI returns `stop` for the call of a named tool, which leaves the model no choice."""
        return "tool_calls" if calls and reason == "stop" and not self.is_named else reason


def tool_use_of(request: ChatRequest, prompt_format: PromptFormat | None) -> ToolUse | None:
    """Select the parser of the request's tool calls; None if it has no tools to call.

    Raises InvalidRequestError if the model's template takes no tools, or its calls cannot be parsed.
    """
    choice, tools = request.tool_choice, request.tools
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return None
    if prompt_format is None or not prompt_format.uses_tools:
        raise invalid("tools", f"the chat template of model {request.model} takes no tools")
    is_parallel = request.parallel_tool_calls is not False
    if isinstance(choice, list):
        schema = _parameters_of(choice[0], tools)
        forced = {"structured_outputs": {"json": schema}}
        return ToolUse(
            lambda: NamedReader(choice[0]), prompt_format.tool_format, forced, is_named=True
        )
    if choice == "required":
        forced = {"structured_outputs": {"json": _any_call(tools, is_parallel=is_parallel)}}
        return ToolUse(reader_of_forced, prompt_format.tool_format, forced, is_parallel=is_parallel)
    found = prompt_format.tool_format
    if found is None:
        raise invalid(
            "tools",
            f"the tool call format of model {request.model} is unknown; an operator may declare it as "
            "tool_call_format in its chat.json. Until then tool_choice can be none, required or a name",
        )
    # Its opening marker is a special token, which texts leave out by default.
    shown = {"skip_special_tokens": False} if found is ToolFormat.MISTRAL else {}
    return ToolUse(lambda: reader_of(found), found, shown, is_parallel=is_parallel)


def _parameters_of(name: str, tools: Sequence[Tool]) -> Any:
    for tool in tools:
        if tool.function.name == name:
            return tool.function.parameters or {"type": "object"}
    raise invalid("tool_choice", f"there is no tool {name[:64]!r} among the tools")


def _any_call(tools: Sequence[Tool], *, is_parallel: bool) -> dict[str, Any]:
    definitions: dict[str, dict[str, JsonValue]] = {}
    calls = [_call_of(tool.function, definitions) for tool in tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        schema["maxItems"] = 1
    return schema | definitions


def _call_of(function: Function, definitions: dict[str, dict[str, JsonValue]]) -> dict[str, Any]:
    """The schema of one function's call. Its definitions move to `definitions`, because references
    start at the root.
    """
    parameters = dict(function.parameters or {"type": "object"})
    for key in ("$defs", "definitions"):
        defined = parameters.pop(key, None)
        if not isinstance(defined, dict):
            continue
        known = definitions.setdefault(key, {})
        if any(known.get(name, schema) != schema for name, schema in defined.items()):
            raise invalid("tools", f"two of them define different schemas of one name in {key}")
        known |= defined
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [function.name]},
            "parameters": parameters,
        },
        "required": ["name", "parameters"],
    }


# --- Responses ------------------------------------------------------------------------------------


def chat_completion(
    request: ChatRequest, use: ToolUse | None, rows: Sequence[ResultRow]
) -> dict[str, Any]:
    """The response to a request, from its results, one for each choice."""
    answer = {
        "id": f"chatcmpl-{rows[0].id}",
        "object": "chat.completion",
        "created": created(rows[0].id),
        "model": request.model,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "choices": [_choice(request, use, place, row) for place, row in enumerate(rows)],
    }
    usage = usage_of(rows, len(rows))
    return answer if usage is None else answer | {"usage": usage}


def _choice(
    request: ChatRequest, use: ToolUse | None, place: int, row: ResultRow
) -> dict[str, Any]:
    message, finish_reason = chat_message(use, row)
    logprobs = None
    if request.logprobs:
        logprobs = _logprobs(row.token_logprobs(), request.top_logprobs or 0)
    return {
        "index": place,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def chat_message(use: ToolUse | None, row: ResultRow) -> tuple[dict[str, Any], str | None]:
    """A completed result as the assistant's message, and its finish reason."""
    text, reason = row.text, row.finish_reason
    if use is None:
        return {"role": "assistant", "content": text, "refusal": None}, reason
    words, calls = read_all(use.new_reader(), text)
    calls = calls if use.is_parallel else calls[:1]
    message: dict[str, Any] = {"role": "assistant", "content": words or None, "refusal": None}
    if calls:
        message["tool_calls"] = [
            call_to_wire(call_id(use.tool_format, row.id, number), call)
            for number, call in enumerate(calls)
        ]
    elif not words:
        message["content"] = ""
    return message, use.finish_reason(reason, len(calls))


def call_to_wire(identifier: str, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": identifier, "type": "function", "function": function}


def _logprobs(tokens: Sequence[dict[str, dict[str, Any]]], count: int) -> dict[str, Any]:
    content = []
    for token in tokens:
        if token:
            entry = _token(sampled_of(token))
            entry["top_logprobs"] = [_token(one) for one in likeliest(token, count)]
            content.append(entry)
    return {"content": content, "refusal": None}


def token_logprobs(tokens: Sequence[dict[str, dict[str, Any]]], count: int) -> list[Any]:
    """Log probabilities of a text's tokens, each with the `count` most likely ones."""
    content: list[Any] = _logprobs(tokens, count)["content"]
    return content


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    text = entry["decoded_token"] or ""
    # A token may be a part of a character; the engine does not return its bytes.
    encoded = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob_of(entry), "bytes": encoded}


class ChatFrames:
    """Encoder of a stream's chunks. Their constant parts are encoded once."""

    def __init__(self, request: ChatRequest, use: ToolUse | None, ids: Sequence[UUID]) -> None:
        self._ids = ids
        self._use = use
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._head = b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":%d,"model":%b,"system_fingerprint":%b,' % (
            str(ids[0]).encode(), created(ids[0]), orjson.dumps(request.model),
            orjson.dumps(SYSTEM_FINGERPRINT),
        )  # fmt: skip
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        text = b'"choices":[{"index":%d,"delta":{"content":'
        self._before_text = [self._head + text % place for place in range(len(ids))]
        self._behind_text = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._readers = [use.new_reader() for _ in ids] if use else []
        self._calls = [0] * len(ids)

    def begin(self) -> bytes:
        """The first chunk of each choice: its role."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(place, role) for place in range(len(self._ids)))

    def delta(self, place: int, text: str, tokens: Sequence[Any]) -> bytes:
        """Chunks for more text; a call is sent when it is complete."""
        logprobs = None if self._top is None else _logprobs(tokens, self._top)
        if self._use is None:
            if logprobs is not None:
                return self._chunk(place, {"content": text}, logprobs)
            return self._before_text[place] + orjson.dumps(text) + self._behind_text
        pieces = self._readers[place].feed(text)
        if not pieces and logprobs and logprobs["content"]:
            pieces = [""]
        return self._chunks(place, pieces, logprobs)

    def end(self, place: int, row: ResultRow) -> bytes:
        """The last chunk of a choice: its finish reason."""
        frames, reason = b"", row.finish_reason
        if self._use is not None:
            logprobs = None if self._top is None else _logprobs((), 0)
            frames = self._chunks(place, self._readers[place].finish(), logprobs)
            reason = self._use.finish_reason(reason, self._calls[place])
        return frames + self._chunk(place, {}, None, reason)

    def usage(self, rows: Sequence[ResultRow]) -> bytes:
        """The usage, in a chunk without choices."""
        members = orjson.dumps({"choices": [], "usage": usage_of(rows, len(rows))})
        return self._head + members[1:] + b"\n\n"

    def _chunks(self, place: int, pieces: Sequence[Piece], logprobs: Any) -> bytes:
        """Chunks of text and calls; the first one carries the log probabilities."""
        frames = b""
        for piece in pieces:
            delta: dict[str, Any] = {"content": piece}
            if isinstance(piece, ToolCall):
                number = self._calls[place]
                if number and self._use and not self._use.is_parallel:
                    continue
                self._calls[place] += 1
                tool_format = self._use.tool_format if self._use else None
                identifier = call_id(tool_format, self._ids[place], number)
                delta = {"tool_calls": [{"index": number, **call_to_wire(identifier, piece)}]}
            frames += self._chunk(place, delta, logprobs)
            logprobs = None
        return frames

    def _chunk(
        self, place: int, delta: object, logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {
            "index": place,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._head + b'"choices":[' + orjson.dumps(choice) + b"]" + self._tail
