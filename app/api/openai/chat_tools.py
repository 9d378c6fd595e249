"""Tools of a chat completion, the rules to parse their calls, and the schemas that force calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, PlainValidator

from app.api.openai.schemas import STRICT, value_error
from app.core.errors import invalid_field
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, check_schema
from app.inference.tool_calls import (
    NamedReader,
    Reader,
    ToolFormat,
    reader_of,
    reader_of_forced,
)


def _check_parameters(value: Any) -> Any:
    if not isinstance(value, dict):
        raise value_error("must be a JSON schema of an object")
    return check_schema(value)


class Function(BaseModel):
    """A function that the model may call."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)] | None = None
    parameters: Annotated[dict[str, JsonValue], BeforeValidator(_check_parameters)] | None = None


class Tool(BaseModel):
    """A function with a JSON schema of its arguments."""

    model_config = STRICT

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
    raise value_error("must be `none`, `auto`, `required` or a function by its name")


ToolChoice = Annotated[
    Any,
    PlainValidator(
        _read_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | dict[str, JsonValue] | None,
    ),
]


@dataclass(slots=True, frozen=True)
class ToolUse:
    """Rules to parse the tool calls in one request's results."""

    tool_format: ToolFormat | None
    name: str | None = None  # of the tool that the model has to call
    is_forced: bool = False  # the output is a list of calls
    is_parallel: bool = True
    # Parameters that force a call, or keep its markers in the text.
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def new_reader(self) -> Reader:
        if self.name is not None:
            return NamedReader(self.name)
        if self.is_forced or self.tool_format is None:
            return reader_of_forced()
        return reader_of(self.tool_format)

    def finish_reason(self, reason: str | None, calls: int) -> str | None:
        """OpenAI returns `stop` for the call of a named tool, which leaves the model no choice."""
        return "tool_calls" if calls and reason == "stop" and self.name is None else reason


def parameters_of(name: str, tools: Sequence[Tool]) -> Any:
    for tool in tools:
        if tool.function.name == name:
            return tool.function.parameters or {"type": "object"}
    raise invalid_field("tool_choice", f"there is no tool {name[:64]!r} among the tools")


def schema_of_calls(tools: Sequence[Tool], *, is_parallel: bool) -> dict[str, Any]:
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
            raise invalid_field(
                "tools", f"two of them define different schemas of one name in {key}"
            )
        known |= defined
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [function.name]},
            "parameters": parameters,
        },
        "required": ["name", "parameters"],
    }
