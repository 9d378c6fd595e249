"""`function<sep>NAME` and a fenced block of JSON between DeepSeek's tokens of calls (V3, R1)."""

import re
from functools import partial

from app.inference.tool_calls.deepseek_v31 import NAME, OPENING, SEPARATOR, parse
from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import ToolCall, to_call

_HEAD = re.compile(rf"\s{{0,64}}function{re.escape(SEPARATOR)}{NAME}```json")
_FENCE = "```"


def _read(text: str) -> ToolCall | None:
    head = _HEAD.match(text)
    if head is None:
        return None
    return to_call(text[head.end() :].rstrip().removesuffix(_FENCE), head[1])


FORMAT = Format(
    "deepseek_v3",
    lambda template: OPENING in template and "```json" in template,
    partial(parse, read=_read),
    (OPENING,),
)
