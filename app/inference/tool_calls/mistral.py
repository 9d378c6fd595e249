"""`[TOOL_CALLS]` and a list of calls, or `name[ARGS]{...}` one after another (Mistral)."""

import re

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import Parsing, Source, ToolCall, to_call

_OPENING = "[TOOL_CALLS]"
_SEPARATORS = (_OPENING, "[", ",", "]")
_NAME = r"[A-Za-z0-9_.-]{1,256}"
# In newer models, the call's name and id come before its arguments.
# Every quantifier has a bound: both patterns look at some hundred characters of any text.
_ID, _SPACE = "[A-Za-z0-9]{0,64}", r"\s{0,64}"
_NAME_BEFORE = re.compile(rf"({_NAME})(?:\[CALL_ID\]{_ID})?(?:\[ARGS\])?{_SPACE}(?={{)")
_PARTIAL_NAME = re.compile(rf"{_NAME}(?:\[[A-Z_]{{0,7}}\]?{_ID}(?:\[[A-Z]{{0,4}}\]?)?)?{_SPACE}\Z")


def _parse(source: Source) -> Parsing[None]:
    while (yield from source.copy_until(_OPENING)):
        while (call := (yield from _read_call(source))) is not None:
            source.emit_call(call)
        source.end_calls(_OPENING)


def _read_call(source: Source) -> Parsing[ToolCall | None]:
    yield from source.skip(_SEPARATORS)
    while not source.is_ended and _PARTIAL_NAME.match(source.buffer, source.at):
        yield
    named = _NAME_BEFORE.match(source.buffer, source.at)
    if named:
        source.at = named.end()
    return to_call((yield from source.read_object()), named and named[1])


FORMAT = Format("mistral", lambda template: _OPENING in template, _parse, (_OPENING,))
