"""Arguments of tool calls, and other texts of models, in a form that can be stored and sent back.

A model does not keep to the bounds of requests: `max_tokens` cuts its calls, and it nests and names as it
likes. A client sends them back as it got them, in each later turn; each dialect takes them by the rule of
`earlier_calls`.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH = 64  # of arguments
_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(slots=True, frozen=True)
class EarlierCall:
    """A call of an earlier answer; its arguments are the model's text, or the object that it made of it."""

    id: str
    name: str
    arguments: str | dict[str, Any]


def earlier_calls(content: str, calls: Iterable[EarlierCall]) -> dict[str, Any]:
    """The content and the calls of an earlier answer, for chat templates.

    Arguments are objects, as in transformers. Those that are no JSON object are none, and their text is a
    line of the content: the model sees what it wrote.
    """
    lines = [content] if content else []
    read: list[dict[str, Any]] = []
    for call in calls:
        given = call.arguments
        arguments = _to_object(given)
        if arguments is None:
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            lines.append(to_storable(text))
        function = {"name": to_storable(call.name), "arguments": arguments or {}}
        read.append({"id": call.id, "type": "function", "function": function})
    return {"content": "\n".join(lines)} | ({"tool_calls": read} if read else {})


def _to_object(given: str | dict[str, Any]) -> dict[str, Any] | None:
    if isinstance(given, str):
        return parse_arguments(given) if given.strip() else {}
    try:
        found: dict[str, Any] = to_storable(given)
    except ValueError:
        return None
    return found


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse arguments that a model wrote, for storage; None unless they are a JSON object."""
    try:
        value = to_storable(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def to_storable(value: Any, depth_left: int = _MAX_DEPTH) -> Any:
    """Make JSON storable: no NUL, no half of a surrogate pair, no number beyond JSON's or 64 bits.

    Raises ValueError if it is nested too deep.
    """
    if isinstance(value, str):
        return _NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict | list) and not depth_left:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        return {
            to_storable(key): to_storable(member, depth_left - 1) for key, member in value.items()
        }
    if isinstance(value, list):
        return [to_storable(member, depth_left - 1) for member in value]
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if (isinstance(value, float) and not math.isfinite(value)) or (
        is_int and not -(2**63) <= value < 2**63
    ):
        return str(value)
    return value
