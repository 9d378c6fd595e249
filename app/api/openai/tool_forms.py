"""Tools that a client knows in another form than the model, for which each is a function.

A custom tool takes a text: a function with one string. A tool of a namespace is a function whose name begins
with the namespace's.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.api.tool_arguments import parse_arguments
from app.api.tool_use import ToolForm

_INPUT = "input"  # the function's one argument
_SEPARATOR = "__"


def joined_name(namespace: object, name: str) -> str:
    """The name that the model has for a tool of a namespace."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a custom tool. Its grammar is described to the model, not enforced."""
    described = "The input as a text."
    given = tool.get("format")
    if isinstance(given, dict) and given.get("type") == "grammar":
        inner = given.get("grammar")
        grammar = inner if isinstance(inner, dict) else given
        described = f"A text of this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    return {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": {
            "type": "object",
            "properties": {_INPUT: {"type": "string", "description": described}},
            "required": [_INPUT],
            "additionalProperties": False,
        },
    }


def custom_input(arguments: str) -> str:
    """The text in the arguments of a call; all of them if the model did not keep to the function."""
    found = parse_arguments(arguments) or {}
    value = found.get(_INPUT, next(iter(found.values()), None) if len(found) == 1 else None)
    return value if isinstance(value, str) else arguments


def custom_arguments(text: str) -> str:
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def flatten(tools: Iterable[Mapping[str, Any]]) -> list[tuple[dict[str, Any], ToolForm]]:
    """The functions of tools, custom tools and namespaces, each with the form that its client knows."""
    found: list[tuple[dict[str, Any], ToolForm]] = []
    for tool in tools:
        if tool["type"] != "namespace":
            found.append(_function_of(tool, None))
            continue
        own = [_function_of(one, tool["name"]) for one in tool["tools"]]
        if own and tool.get("description"):
            first = own[0][0]
            words = (f"{tool['name']}: {tool['description']}", first.get("description"))
            first["description"] = "\n".join(filter(None, words))
        found += own
    return found


def _function_of(tool: Mapping[str, Any], namespace: str | None) -> tuple[dict[str, Any], ToolForm]:
    is_custom = tool["type"] == "custom"
    function = custom_function(tool) if is_custom else dict(tool)
    form = ToolForm(tool["name"], namespace, is_custom=is_custom)
    return function | {"name": joined_name(namespace, tool["name"])}, form


def forms_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, ToolForm]:
    """The forms of tools by the names that the model has for them."""
    return {function["name"]: form for function, form in flatten(tools)}
