"""Input items of a response's request.

Stored items have no images: those are in the messages of the response's context.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from app.api.documents import unread_document
from app.api.schema_parts import value_error, without_nul
from app.core.ids import new_id
from app.inference.images import IMAGES, check_url, checked_image, join_pieces

_MAX_ITEMS = 10_000
OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Calls of tools that OpenAI runs, in a conversation that began there: their results are in its answers.
_HOSTED_ITEMS = (
    "web_search_call", "file_search_call", "computer_call", "computer_call_output", "image_generation_call",
    "code_interpreter_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "tool_search_call", "tool_search_output",
)  # fmt: skip
HOSTED = "hosted"  # an item that is left out, with the `name` of its type
_TEXT_PARTS = ("input_text", "output_text", "text")
_DETAILS = ("low", "high", "auto", "original")
_URL = "image_url"  # the member of an image's part

_TEXT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "input_text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "input_image"},
        "image_url": {
            "type": "string",
            "pattern": "^(data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}|https?://.+)$",
            "description": "A data URI, or a URL if LLM_IMAGE_URLS is on.",
        },
        "detail": {"enum": _DETAILS, "description": "Has no effect."},
    },
    "required": ["type", "image_url"],
}
_CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [_TEXT_SCHEMA, _IMAGE_SCHEMA]}},
    ]
}
# An item as the OpenAPI document describes it.
ITEM_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"const": "message"},
                "role": {"const": "user"},
                "content": _CONTENT_SCHEMA,
            },
            "required": ["role", "content"],
        },
        {"type": "object", "description": "Another role's message, or an item of another type."},
    ]
}


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
    kind = given.get("type") or ("message" if "role" in given else None)
    if kind == "message":
        return _read_message(place, given)
    if kind in _HOSTED_ITEMS:
        return {"type": HOSTED, "name": kind}
    if kind in ("function_call", "custom_tool_call"):
        return _read_call(place, given, kind)
    if kind in OUTPUTS:
        call = {"type": kind, "call_id": _text(place, given, "call_id")}
        parts = _read_parts(place, given, "output", takes_images=True)
        has_images = any(map(_is_image, parts))
        return (
            _with_id("fco_", given) | call | {"output": parts if has_images else parts[0]["text"]}
        )
    if kind == "reasoning":
        content = [
            {"type": "reasoning_text", "text": without_nul(text)} for text in _thoughts(given)
        ]
        # An item that has no text is another model's, encrypted.
        return (
            _with_id("rs_", given) | {"type": kind, "summary": [], "content": content}
            if content
            else None
        )
    raise value_error(
        f"item {place} is of type {str(kind)[:40]!r}; message, function_call, custom_tool_call and "
        "their outputs are supported"
    )


def _read_call(place: int, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    prefix, name = ("fc_", "arguments") if kind == "function_call" else ("ctc_", "input")
    call = {one: _text(place, given, one) for one in ("call_id", "name")}
    if given.get("namespace") is not None:
        call["namespace"] = _text(place, given, "namespace")
    text = without_nul(_text(place, given, name))
    return _with_id(prefix, given) | {"type": kind} | call | {name: text}


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


def content_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """The members of the chat message of an item, with the images at their places."""
    content = item["output"] if item["type"] in OUTPUTS else item["content"]
    if isinstance(content, str):
        return {"content": content}
    return join_pieces(
        checked_image(part[_URL]) if _is_image(part) else part["text"] for part in content
    )


def without_images(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as they are stored."""
    return [
        _with_parts(
            item,
            [{name: part[name] for name in part if name != _URL} for part in _parts_of(item)],
        )
        for item in items
    ]


def with_images(
    items: Sequence[dict[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Stored items with the images of their conversation, the last of which are theirs."""
    count = count_images(items)
    if not count:
        return list(items)
    urls: list[str] = [one["url"] for message in messages for one in message.get(IMAGES, ())]
    left = iter(urls[-count:])
    return [
        _with_parts(
            item,
            [
                part | {_URL: next(left, None)} if _is_image(part) else part
                for part in _parts_of(item)
            ],
        )
        for item in items
    ]


def count_images(items: Sequence[Mapping[str, Any]]) -> int:
    return sum(_is_image(part) for item in items for part in _parts_of(item))


def _parts_of(item: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    parts = item.get("output" if item["type"] in OUTPUTS else "content")
    return parts if isinstance(parts, list) else ()


def _with_parts(item: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    name = "output" if item["type"] in OUTPUTS else "content"
    return item | {name: parts} if parts else item


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _read_message(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise value_error(f"item {place} must have the role user, assistant, system or developer")
    parts = given.get("content")
    if role != "user" and isinstance(parts, list) and any(map(_is_image, parts)):
        raise value_error(
            f"item {place} has an image in a message with the role {role}: images are taken in messages "
            "with the role user, and in function_call_output"
        )
    content = _read_parts(place, given, "content", takes_images=role == "user")
    if role == "assistant":
        content = [part | {"type": "output_text", "annotations": []} for part in content]
    return _with_id("msg_", given) | {"type": "message", "role": role, "content": content}


def _read_parts(
    place: int, given: Mapping[str, Any], name: str, *, takes_images: bool
) -> list[dict[str, Any]]:
    """The parts of a content: the texts between its images as lines of one; at least one part."""
    content = given.get(name)
    if content is None and (name == "output" or given.get("role") == "assistant"):
        content = ""  # an answer whose reasoning never ended has no content
    if isinstance(content, str):
        return [_text_part([content])]
    if not isinstance(content, list):
        raise value_error(f"item {place} needs {name}: a text, or a list of parts")
    parts: list[dict[str, Any]] = []
    texts: list[str] = []
    for part in content:
        if _is_image(part) and takes_images:
            parts += [_text_part(texts)] if texts else []
            parts.append(_read_image(place, part))
            texts = []
        elif name == "output" and isinstance(part, dict) and part.get("type") == "input_file":
            texts.append(unread_document(part.get("filename")))
        else:
            texts.append(_read_text(place, part, takes_images=takes_images))
    return [*parts, _text_part(texts)] if texts or not parts else parts


def _text_part(texts: Sequence[str]) -> dict[str, Any]:
    return {"type": "input_text", "text": without_nul("\n".join(texts))}


def _read_text(place: int, part: Any, *, takes_images: bool) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind else None
    if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
        known = "text and input_image are" if takes_images else "only text is"
        raise value_error(f"item {place} has a part of type {str(kind)[:40]!r}: {known} supported")
    return text


def _read_image(place: int, part: Mapping[str, Any]) -> dict[str, Any]:
    url, detail = part.get(_URL), part.get("detail")
    if part.get("file_id") is not None:
        raise value_error(
            f"item {place} has an image with file_id, which is not supported: send it as a data URI in "
            "image_url"
        )
    if not isinstance(url, str):
        raise value_error(f"item {place} has an image without image_url, a data URI")
    try:
        check_url(url)
    except PydanticCustomError as error:
        raise value_error(f"item {place} has a wrong image_url: {error.message()}") from None
    return {
        "type": "input_image",
        "detail": detail if detail in _DETAILS else "auto",
        _URL: url,
    }


def _with_id(prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    identifier = given.get("id")
    is_id = isinstance(identifier, str) and 0 < len(identifier) <= 256
    return {"id": identifier if is_id else f"{prefix}{new_id()}", "status": "completed"}


def _text(place: int, given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise value_error(f"item {place} needs {name}, a text")
    return value
