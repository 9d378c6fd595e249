"""Input items of a response's request."""

from collections.abc import Mapping
from typing import Any

from app.api.schema_parts import value_error
from app.core.ids import new_id

_MAX_ITEMS = 10_000
_TEXT_PARTS = ("input_text", "output_text", "text")


def read_input(value: Any) -> list[dict[str, Any]]:
    """The input as items, each with an id, as `input_items` returns them."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_ITEMS:
        raise value_error(f"must be a text, or a list of 1 to {_MAX_ITEMS} items")
    return [item for place, given in enumerate(value) if (item := _read_item(place, given))]


def _read_item(place: int, given: Any) -> dict[str, Any] | None:
    """Validate an item; None for one that the model does not receive."""
    if not isinstance(given, dict):
        raise value_error(f"item {place} must be an object")
    kind = given.get("type", "message" if "role" in given else None)
    if kind == "message":
        return _read_message(place, given)
    if kind == "function_call":
        names = ("call_id", "name", "arguments")
        call = {name: _text(place, given, name) for name in names}
        return _with_id("fc_", given) | {"type": kind} | call
    if kind == "function_call_output":
        output = {
            "call_id": _text(place, given, "call_id"),
            "output": _join(place, given, "output"),
        }
        return _with_id("fco_", given) | {"type": kind} | output
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text} for text in _thoughts(given)]
        # An item that has no text is another model's, encrypted.
        return (
            _with_id("rs_", given) | {"type": kind, "summary": [], "content": content}
            if content
            else None
        )
    raise value_error(
        f"item {place} is of type {str(kind)[:40]!r}; message, function_call and "
        "function_call_output are supported"
    )


def reasoning_text(item: Mapping[str, Any]) -> str:
    return "\n".join(part["text"] for part in item["content"])


def _thoughts(given: Mapping[str, Any]) -> list[str]:
    """The texts of a reasoning item: its content, or the summary where that is all there is."""
    for name in ("content", "summary"):
        parts = given.get(name)
        parts = parts if isinstance(parts, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if found := [text for text in texts if isinstance(text, str) and text]:
            return found
    return []


def _read_message(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise value_error(f"item {place} must have the role user, assistant, system or developer")
    kind = "output_text" if role == "assistant" else "input_text"
    content: dict[str, Any] = {"type": kind, "text": _join(place, given, "content")}
    if role == "assistant":
        content["annotations"] = []
    return _with_id("msg_", given) | {"type": "message", "role": role, "content": [content]}


def _join(place: int, given: Mapping[str, Any], name: str) -> str:
    content = given.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise value_error(f"item {place} needs {name}: a text, or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise value_error(
                f"item {place} has a part of type {str(kind)[:40]!r}: only text is supported"
            )
        texts.append(text)
    return "\n".join(texts)


def _with_id(prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    identifier = given.get("id")
    is_id = isinstance(identifier, str) and 0 < len(identifier) <= 256
    return {"id": identifier if is_id else f"{prefix}{new_id()}", "status": "completed"}


def _text(place: int, given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise value_error(f"item {place} needs {name}, a text")
    return value
