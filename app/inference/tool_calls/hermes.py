"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in the text (Hermes, Qwen)."""

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import Parsing, Source, to_call

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
# Other families write XML instead of JSON between the tags.
_XML = ("<function=", "<arg_key>", "<parameter=")


def _parse(source: Source) -> Parsing[None]:
    while (yield from source.copy_until(_OPENING)):
        yield from source.skip()
        text = yield from source.read_object()
        is_closed = text is not None and (yield from source.close(_CLOSING))
        call = to_call(text) if is_closed else None
        if call is None:
            source.reject(_OPENING)
        else:
            source.emit_call(call)


def _is_taught_by(template: str) -> bool:
    return _OPENING in template and not any(marker in template for marker in _XML)


FORMAT = Format("hermes", _is_taught_by, _parse, (_OPENING,))
