"""Qwen's XML notation between `<seed:tool_call>` and `</seed:tool_call>` (Seed-OSS)."""

from functools import partial

from app.inference.tool_calls.qwen_xml import parse
from app.inference.tool_calls.reader import Format

_OPENING, _CLOSING = "<seed:tool_call>", "</seed:tool_call>"

FORMAT = Format(
    "seed_xml",
    # The template may build its tags from a variable.
    lambda template: "seed:tool_call" in template and "<function=" in template,
    partial(parse, opening=_OPENING, closing=_CLOSING),
    (_OPENING,),
)
