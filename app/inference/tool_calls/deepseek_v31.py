"""`NAME<sep>{...}` between DeepSeek's tokens of calls (V3.1)."""

import re
from collections.abc import Callable
from functools import partial

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import Parsing, Source, ToolCall, to_call

_BAR, _GAP = "\uff5c", "\u2581"  # a wide bar, and the mark of a space in tokens


def _tag(*words: str) -> str:
    return f"<{_BAR}{_GAP.join(words)}{_BAR}>"


OPENING, _CLOSING = _tag("tool", "calls", "begin"), _tag("tool", "calls", "end")
_CALL, _CALL_END = _tag("tool", "call", "begin"), _tag("tool", "call", "end")
SEPARATOR = _tag("tool", "sep")
NAME = r"\s{0,64}([A-Za-z0-9_.:-]{1,256})\s{0,64}"
_HEAD = re.compile(NAME + re.escape(SEPARATOR))


def parse(source: Source, read: Callable[[str], ToolCall | None]) -> Parsing[None]:
    while (yield from source.copy_until(OPENING)):
        while (call := (yield from _read_call(source, read))) is not None:
            source.emit_call(call)
        source.end_calls(OPENING)


def _read_call(source: Source, read: Callable[[str], ToolCall | None]) -> Parsing[ToolCall | None]:
    yield from source.skip((_CALL, _CLOSING))
    if not source.buffer[: source.at].endswith(_CALL):
        return None
    text, _ = yield from source.read_until(_CALL_END, _CLOSING)
    return read(text)


def _read(text: str) -> ToolCall | None:
    head = _HEAD.match(text)
    return to_call(text[head.end() :], head[1]) if head else None


FORMAT = Format(
    "deepseek_v31",
    lambda template: OPENING in template and "```json" not in template,
    partial(parse, read=_read),
    (OPENING,),
)
