"""Tools of a chat completion, and the rules to parse their calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, PlainValidator

from app.api.openai.schemas import STRICT, value_error
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
