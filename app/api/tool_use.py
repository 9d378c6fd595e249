"""Tool use of one request, the same in all dialects: how its calls are forced, parsed and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import JsonValue

from app.core.errors import invalid_field
from app.inference.prompts import PromptFormat
from app.inference.tool_calls import (
    NamedReader,
    Reader,
    Schemas,
    ToolFormat,
    reader_of,
    reader_of_forced,
)


class FunctionSchema(Protocol):
    """A function that the model may call, with the JSON schema of its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> dict[str, JsonValue] | None: ...


@dataclass(slots=True, frozen=True)
class ToolForm:
    """A tool as its client knows it; for the model each is a function."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # it takes a text


@dataclass(slots=True, frozen=True)
class ToolUse:
    """Rules to parse the tool calls in one request's results."""

    tool_format: ToolFormat | None
    name: str | None = None  # of the tool that the model has to call
    is_forced: bool = False  # the output is a list of calls
    is_parallel: bool = True
    schemas: Schemas = field(default_factory=dict)
    # Parameters that force a call, or keep its markers in the text.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # Tools that their client knows in another form, by the names of the functions.
    forms: Mapping[str, ToolForm] = field(default_factory=dict)

    def new_reader(self) -> Reader:
        if self.name is not None:
            return NamedReader(self.name)
        if self.is_forced or self.tool_format is None:
            return reader_of_forced()
        return reader_of(self.tool_format, self.schemas)

    def finish_reason(self, reason: str | None, calls: int) -> str | None:
        """OpenAI returns `stop` for the call of a named tool, which leaves the model no choice."""
        return "tool_calls" if calls and reason == "stop" and self.name is None else reason


def choose_tool_use(
    model_name: str,
    prompt_format: PromptFormat | None,
    functions: Sequence[FunctionSchema],
    choice: Any,
    *,
    is_parallel: bool,
) -> ToolUse | None:
    """The rules to parse a request's tool calls; None if it has no tools to call.

    `choice` is None, `none`, `auto`, `required`, or the function's name in a list of one. Raises
    InvalidRequestError if the model's template takes no tools, or its calls cannot be parsed.
    """
    if not functions or choice == "none":
        if choice not in (None, "none", "auto"):
            raise invalid_field("tool_choice", "needs tools")
        return None
    if prompt_format is None or not prompt_format.uses_tools:
        raise invalid_field("tools", f"the chat template of model {model_name} takes no tools")
    found = prompt_format.tool_format
    if isinstance(choice, list):
        forced = {"structured_outputs": {"json": _parameters_of(choice[0], functions)}}
        return ToolUse(found, choice[0], sampling=forced)
    if choice == "required":
        forced = {
            "structured_outputs": {"json": _schema_of_calls(functions, is_parallel=is_parallel)}
        }
        return ToolUse(found, is_forced=True, is_parallel=is_parallel, sampling=forced)
    if found is None:
        raise invalid_field(
            "tools",
            f"the tool call format of model {model_name} is unknown; an operator may declare it as "
            "tool_call_format in its chat.json. Until then tool_choice can be none, required or a name",
        )
    # Openings that are special tokens would be missing in the text.
    is_shown = found is ToolFormat.MISTRAL or prompt_format.has_special_calls
    shown = {"skip_special_tokens": False} if is_shown else {}
    schemas = {function.name: function.parameters or {} for function in functions}
    return ToolUse(found, is_parallel=is_parallel, schemas=schemas, sampling=shown)


def _parameters_of(name: str, functions: Sequence[FunctionSchema]) -> Any:
    for function in functions:
        if function.name == name:
            return function.parameters or {"type": "object"}
    raise invalid_field("tool_choice", f"there is no tool {name[:64]!r} among the tools")


def _schema_of_calls(functions: Sequence[FunctionSchema], *, is_parallel: bool) -> dict[str, Any]:
    definitions: dict[str, dict[str, JsonValue]] = {}
    calls = [_call_of(function, definitions) for function in functions]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        schema["maxItems"] = 1
    return schema | definitions


def _call_of(
    function: FunctionSchema, definitions: dict[str, dict[str, JsonValue]]
) -> dict[str, Any]:
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
