"""Selection of the tool call parser, and the schemas that force calls."""

from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue

from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.chat_tools import Function, Tool, ToolUse
from app.core.errors import invalid_field
from app.inference.prompts import PromptFormat
from app.inference.tool_calls import ToolFormat


def tool_use_of(request: ChatRequest, prompt_format: PromptFormat | None) -> ToolUse | None:
    """Select the parser of the request's tool calls; None if it has no tools to call.

    Raises InvalidRequestError if the model's template takes no tools, or its calls cannot be parsed.
    """
    choice, tools = request.tool_choice, request.tools
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise invalid_field("tool_choice", "needs tools")
        return None
    if prompt_format is None or not prompt_format.uses_tools:
        raise invalid_field("tools", f"the chat template of model {request.model} takes no tools")
    is_parallel = request.parallel_tool_calls is not False
    found = prompt_format.tool_format
    if isinstance(choice, list):
        forced = {"structured_outputs": {"json": _parameters_of(choice[0], tools)}}
        return ToolUse(found, choice[0], sampling=forced)
    if choice == "required":
        forced = {"structured_outputs": {"json": _any_call(tools, is_parallel=is_parallel)}}
        return ToolUse(found, is_forced=True, is_parallel=is_parallel, sampling=forced)
    if found is None:
        raise invalid_field(
            "tools",
            f"the tool call format of model {request.model} is unknown; an operator may declare it as "
            "tool_call_format in its chat.json. Until then tool_choice can be none, required or a name",
        )
    # Its opening marker is a special token, which texts leave out by default.
    shown = {"skip_special_tokens": False} if found is ToolFormat.MISTRAL else {}
    return ToolUse(found, is_parallel=is_parallel, sampling=shown)


def _parameters_of(name: str, tools: Sequence[Tool]) -> Any:
    for tool in tools:
        if tool.function.name == name:
            return tool.function.parameters or {"type": "object"}
    raise invalid_field("tool_choice", f"there is no tool {name[:64]!r} among the tools")


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
