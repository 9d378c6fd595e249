"""OpenAI's responses: requests to conversations, results to responses.

https://platform.openai.com/docs/api-reference/responses. A request becomes a chat completion's, which
has messages, tools and parameters; the members that a response echoes are stored with the result.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)

from app.api.hosted_tools import HostedTool
from app.api.json_codec import to_field_errors
from app.api.openai.batches_schemas import OpenAIMetadata
from app.api.openai.chat_messages import MAX_TOOLS
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.responses_input import (
    HOSTED,
    ITEM_SCHEMA,
    OUTPUTS,
    content_of,
    read_input,
    reasoning_text,
    without_images,
)
from app.api.openai.responses_tools import ResponseFunction, ResponseTool
from app.api.openai.schemas import OpenAIRequest
from app.api.openai.stored_responses import DIALECT, NEUTRAL
from app.api.openai.tool_forms import custom_arguments, flatten, joined_name
from app.api.output_rules import OutputRules
from app.api.schema_parts import STRICT, ModelText, Refused
from app.core.bounded_json import check_json
from app.core.errors import InvalidRequestError
from app.core.whole_numbers import WHOLE
from app.inference.sampling import MAX_TOKENS
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH

_LOGPROBS = "message.output_text.logprobs"


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
    model_config = STRICT

    format: _Format | None = Field(
        None, description="`text`, `json_object`, or `json_schema` with `name` and `schema`."
    )
    verbosity: str | None = Field(None, description="Ignored.")


class ResponseStreamOptions(BaseModel):
    model_config = STRICT

    include_obfuscation: bool | None = Field(None, description="Ignored.")


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Given to the model's template."
    )
    summary: JsonValue = Field(
        None, description="Echoed: the item of the reasoning has its whole text, and no summary."
    )


_INPUT_SCHEMA = str | list[Annotated[dict[str, JsonValue], WithJsonSchema(ITEM_SCHEMA)]]


class ResponseCreate(OpenAIRequest):
    input: Annotated[
        list[dict[str, Any]], PlainValidator(read_input, json_schema_input_type=_INPUT_SCHEMA)
    ]
    instructions: Annotated[ModelText, Field(max_length=2_000_000)] | None = Field(
        None, description="The system message; not carried over to the next response."
    )
    previous_response_id: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Continue the conversation of this response."
    )
    background: bool | None = Field(None, description="Respond at once; the model continues.")
    store: bool | None = Field(
        None, description="false: the texts are erased once they are delivered."
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = None
    metadata: OpenAIMetadata | None = Field(  # type: ignore[assignment] # narrower, never written
        None, description="Kept with the response."
    )
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Other types than these are left out, or refused (LLM_HOSTED_TOOLS)."
    )
    tool_choice: _Choice = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = Field(
        None, description=f"`{_LOGPROBS}`; others are ignored."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        None, description="As in chat completions: variables of the model's template."
    )
    service_tier: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored.")
    max_tool_calls: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = Field(
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
    def hosted(self) -> dict[str, str]:
        """The types of tools and items that this service does not run, by their places."""
        tools = enumerate(self.tools or ())
        items = enumerate(self.input)
        return {
            f"tools.{place}.type": one.type for place, one in tools if isinstance(one, HostedTool)
        } | {f"input.{place}.type": one["name"] for place, one in items if one["type"] == HOSTED}

    def _own_tools(self) -> list[dict[str, Any]]:
        return [one.model_dump() for one in self.tools or () if not isinstance(one, HostedTool)]

    def _items(self) -> list[dict[str, Any]]:
        return [item for item in self.input if item["type"] != HOSTED]

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def to_chat(self) -> ChatRequest:
        chat: dict[str, Any] = {
            name: getattr(self, name) for name in self.model_fields_set & _SAME
        } | {"model": self.model, "messages": self._messages(), "metadata": self.metadata}
        if self.has_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        chat["max_completion_tokens"] = self.max_output_tokens
        if self.text and self.text.format:
            chat["response_format"] = _to_response_format(self.text.format)
        if functions := flatten(self._own_tools()):
            chat["tools"] = [
                {"type": "function", "function": function} for function, _ in functions
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
        reasoning = ""
        for item in self._items():
            if item["type"] == "reasoning":
                reasoning += reasoning_text(item)
                continue
            if item["type"] == "message":
                messages.append({"role": item["role"]} | content_of(item))
            elif item["type"] in OUTPUTS:
                result = {"role": "tool", "tool_call_id": item["call_id"]}
                messages.append(result | content_of(item))
            else:
                if reasoning or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(_call_of(item))
            if reasoning and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = reasoning
            reasoning = ""
        return messages

    def to_stored(self, rules: OutputRules, defaults: Mapping[str, float] = {}) -> str:
        """Serialize the members that later responses echo, as JSON text.

        `defaults` are the model's own parameters of sampling.
        """
        calls, use = None, rules.tools
        if use is not None:
            calls = {
                "format": use.tool_format,
                "is_forced": use.is_forced,
                "name": use.name,
                "is_parallel": use.is_parallel,
            }
        stored: dict[str, Any] = {
            "dialect": DIALECT,
            "background": bool(self.background),
            "is_stored": self.store is not False,
            "has_instructions": bool(self.instructions),
            "logprobs": (self.top_logprobs or 0) if self.has_logprobs else None,
            "calls": calls,
            "input": without_images(self._items()),
            "echo": self._echo() | self._sampling(defaults),
        }
        tools = self._own_tools()
        if any(tool["type"] != "function" for tool in tools):
            stored["echo"]["reasoning"]["tools"] = tools
        if rules.reasoning is not None:
            stored["echo"]["reasoning"]["rules"] = rules.reasoning.to_stored()
        return orjson.dumps(stored).decode()

    def _echo(self) -> dict[str, Any]:
        form = self.text.format if self.text else None
        text: dict[str, Any] = form or {"type": "text"}
        if text.get("type") == "json_schema":
            text = {"description": None, "strict": False} | text
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
            "reasoning": _to_reasoning(self.reasoning),
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "text": {"format": text},
            "tool_choice": self.tool_choice or "auto",
            "tools": [_to_function(one) for one, _ in flatten(self._own_tools())],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user,
        }

    def _sampling(self, defaults: Mapping[str, float]) -> dict[str, float]:
        """The parameters that the model uses, as far as they are known: each is a number."""
        known = NEUTRAL | {name: defaults[name] for name in NEUTRAL if name in defaults}
        given = {name: getattr(self, name) for name in NEUTRAL}
        return known | {name: value for name, value in given.items() if value is not None}


# Members with the same name and meaning in a chat completion.
_SAME = (
    OpenAIRequest.model_fields.keys() & ChatRequest.model_fields.keys()
    - {"model", "metadata", "stream", "stream_options", "store", "n", "user"}
) | {"parallel_tool_calls", "chat_template_kwargs"}  # fmt: skip


def _to_reasoning(given: Reasoning | None) -> dict[str, Any]:
    summary = given.summary if given else None
    return {
        "effort": given.effort if given else None,
        "summary": summary if summary in ("auto", "concise", "detailed") else None,
    }


def _to_response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return dict(given)
    return {
        "type": "json_schema",
        "json_schema": {key: given[key] for key in given if key != "type"},
    }


def _to_tool_choice(given: Any) -> Any:
    is_named = isinstance(given, dict) and given.get("type") in ("function", "custom")
    if is_named and isinstance(given.get("name"), str):
        name = joined_name(given.get("namespace"), given["name"])
        return {"type": "function", "function": {"name": name}}
    return given


def _call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call among the input in the form of a chat completion."""
    arguments = item["arguments"] if "arguments" in item else custom_arguments(item["input"])
    name = joined_name(item.get("namespace"), item["name"])
    function = {"name": name, "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _to_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as it is echoed, and as processes of older versions read it."""
    return ResponseFunction.model_validate({"type": "function"} | dict(function)).model_dump()
