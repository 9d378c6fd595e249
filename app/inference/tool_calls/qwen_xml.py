"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen 3 Coder)."""

import re
from functools import partial
from typing import Any

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import Parsing, Schemas, Source, ToolCall, new_call
from app.inference.tool_calls.values import typed_value

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"\s{0,64}([^<>\s]{1,256})\s{0,64}>")
_SPACE = re.compile(r"\s*")


def parse(source: Source, opening: str, closing: str) -> Parsing[None]:
    """Models often leave the outer tag out: a call begins with either."""
    while marker := (yield from source.copy_until(opening, _FUNCTION)):
        if marker == opening:
            yield from source.skip((_FUNCTION,))
        call, end = None, ""
        if source.buffer[: source.at].endswith(_FUNCTION):
            text, end = yield from source.read_until(_FUNCTION_END, closing)
            call = _to_call(text, source.schemas, is_closed=bool(end))
        if call is None:
            source.reject(marker)
            continue
        source.emit_call(call)
        if end == _FUNCTION_END:
            yield from source.skip((closing,))
            source.end_calls()


def _to_call(text: str, schemas: Schemas, *, is_closed: bool) -> ToolCall | None:
    named = _NAME.match(text)
    if named is None:
        return None
    arguments: dict[str, Any] = {}
    schema = schemas.get(named[1], {})
    at = _skip_space(text, named.end())
    while text.startswith(_PARAMETER, at):
        key = _NAME.match(text, at + len(_PARAMETER))
        if key is None:
            return None
        end = text.find(_PARAMETER_END, key.end())
        if end < 0 and not is_closed:
            return None
        value = text[key.end() : end if end >= 0 else len(text)]
        arguments[key[1]] = typed_value(_trim(value), schema, key[1])
        at = len(text) if end < 0 else _skip_space(text, end + len(_PARAMETER_END))
    try:
        return new_call(named[1], arguments) if at == len(text) else None
    except ValueError:
        return None


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _trim(value: str) -> str:
    """Remove the line breaks of the notation, one on each side."""
    return value.removeprefix("\n").removesuffix("\n")


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"

FORMAT = Format(
    "qwen_xml",
    lambda template: _OPENING in template and _FUNCTION in template,
    partial(parse, opening=_OPENING, closing=_CLOSING),
    (_OPENING, _FUNCTION),
)
