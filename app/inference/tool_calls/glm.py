"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM 4.5 and later)."""

import re
from typing import Any

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import Parsing, Schemas, Source, ToolCall, new_call
from app.inference.tool_calls.values import typed_value

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"\s{0,64}([A-Za-z0-9_.:-]{1,256})\s{0,64}")
_KEY = re.compile(r"\s{0,64}<arg_key>([^<]{1,256})</arg_key>\s{0,64}<arg_value>")
_VALUE_END = "</arg_value>"


def _parse(source: Source) -> Parsing[None]:
    while (yield from source.copy_until(_OPENING)):
        text, end = yield from source.read_until(_CLOSING)
        call = _to_call(text, source.schemas) if end or text else None
        if call is None:
            source.reject(_OPENING)
        else:
            source.emit_call(call)


def _to_call(text: str, schemas: Schemas) -> ToolCall | None:
    named = _NAME.match(text)
    if named is None:
        return None
    arguments: dict[str, Any] = {}
    schema = schemas.get(named[1], {})
    at = named.end()
    while key := _KEY.match(text, at):
        end = text.find(_VALUE_END, key.end())
        if end < 0:
            return None
        name = key[1].strip()
        arguments[name] = typed_value(text[key.end() : end], schema, name)
        at = end + len(_VALUE_END)
    try:
        return None if text[at:].strip() else new_call(named[1], arguments)
    except ValueError:
        return None


FORMAT = Format(
    "glm",
    lambda template: _OPENING in template and "<arg_key>" in template,
    _parse,
    (_OPENING,),
)
