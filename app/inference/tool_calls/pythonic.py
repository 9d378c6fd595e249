"""`[NAME(KEY=VALUE, ...), ...]` as the whole output: Python's notation of calls (Llama 3.2 and 4)."""

import re
from typing import Any

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import Parsing, Source, ToolCall, new_call

_TAGS = ("<|python_start|>", "<|python_end|>")
_HEAD = re.compile(r"\[\s{0,64}[A-Za-z_][\w.]{0,255}\(")
_PARTIAL_HEAD = re.compile(r"(?:\[(?:\s{0,64}(?:[A-Za-z_][\w.]{0,255})?)?)?\Z")
_MAX_DEPTH = 32  # of values
_MAX_DIGITS = 1000
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<name>[A-Za-z_][\w.]{0,255})
    | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<sign>[\[\](){}=,:])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U000[0-9A-Fa-f]{5}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSINGS = {"[": "]", "(": ")"}


def _parse(source: Source) -> Parsing[None]:
    yield from source.skip(_TAGS[:1])
    while not source.is_ended and _PARTIAL_HEAD.match(source.buffer, source.at):
        yield
    text = None
    if _HEAD.match(source.buffer, source.at):
        text = yield from source.read_list()
    for call in _to_calls(text) if text is not None else ():
        source.emit_call(call)
        yield from source.skip(_TAGS[1:])
    source.end_calls()
    yield from source.copy_rest()


def _to_calls(text: str) -> list[ToolCall]:
    """The calls of a list; none if it is anything else."""
    try:
        return _Values(text).read_calls()
    except (ValueError, StopIteration, KeyError, TypeError):
        return []


class _Values:
    """A parser of literals; it raises ValueError, StopIteration, KeyError or TypeError."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._kind = self._word = ""
        self._next()

    def read_calls(self) -> list[ToolCall]:
        self._take("[")
        calls = []
        while self._word != "]":
            name = self._take_kind("name")
            self._take("(")
            calls.append(new_call(name, self._read_members(")", "=")))
            self._separate("]")
        if self._text[self._at :].strip():
            raise ValueError
        return calls

    def _read_members(self, closing: str, sign: str, depth: int = 0) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while self._word != closing:
            key = self._take_kind("name") if sign == "=" else self._read(depth)
            if not isinstance(key, str):
                raise TypeError
            self._take(sign)
            members[key] = self._read(depth)
            self._separate(closing)
        self._next()
        return members

    def _read(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError
        kind, word = self._kind, self._word
        self._next()
        if kind == "string":
            return _ESCAPE.sub(_unescape, word[1:-1])
        if kind == "number":
            return _number(word)
        if kind == "name":
            return _WORDS[word]
        if word == "{":
            return self._read_members("}", ":", depth + 1)
        values = []
        closing = _CLOSINGS[word]
        while self._word != closing:
            values.append(self._read(depth + 1))
            self._separate(closing)
        self._next()
        return values

    def _separate(self, closing: str) -> None:
        if self._word != closing:
            self._take(",")

    def _take(self, sign: str) -> None:
        if self._kind != "sign" or self._word != sign:
            raise ValueError
        self._next()

    def _take_kind(self, kind: str) -> str:
        if self._kind != kind:
            raise ValueError
        word = self._word
        self._next()
        return word

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            self._kind = self._word = ""
            if self._text[self._at :].strip():
                raise ValueError
            return
        self._at = found.end()
        self._kind = found.lastgroup or ""
        self._word = found[self._kind]


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code if code in "\\'\"" else found[0])


def _number(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise ValueError
    try:
        return int(text)
    except ValueError:
        return float(text)


FORMAT = Format(
    "pythonic",
    lambda template: "[func_name1(params_name1" in template,  # as the models were trained
    _parse,
)
