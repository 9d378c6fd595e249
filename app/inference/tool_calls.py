"""Tool calls inside a model's text: which format its chat template teaches, and finding them.

Models write calls in one of a few ways, each fixed by the model's training:

- hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere (Hermes, Qwen)
- llama3_json: the whole answer is `{"name": ..., "parameters": {...}}`, several with `;` between
- mistral: `[TOOL_CALLS]` and a list of calls, or `name[ARGS]{...}` one after another

What looks like a call and is none stays text: nothing of what the model said is lost.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

_SPACE = " \t\r\n"
_SLICE = 4096  # characters
_ARGUMENT_KEYS = ("arguments", "parameters")
_NAME = r"[A-Za-z0-9_.-]{1,256}"
# Of Mistral's newer models: the name, and what may stand between it and the arguments.
_NAME_BEFORE = re.compile(rf"({_NAME})(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?={{)")
_BEGINS_NAME = re.compile(rf"{_NAME}(?:\[[A-Z_]*\]?[A-Za-z0-9]*(?:\[[A-Z]*\]?)?)?\s*\Z")
# XML inside the tags, which other families write, is no JSON.
_OTHER_FAMILIES = ("<function=", "<arg_key>", "<parameter=")


class ToolFormat(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


@dataclass(slots=True, frozen=True)
class ToolCall:
    """One call: the tool's name, and its arguments as JSON text."""

    name: str
    arguments: str


Piece = str | ToolCall


class Reader(Protocol):
    """Takes a model's text in pieces and gives back text and calls, however it was cut."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What is left at the text's end."""
        ...


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches, by its markers; None for one we cannot read."""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        is_xml = any(marker in template for marker in _OTHER_FAMILIES)
        return None if is_xml else ToolFormat.HERMES
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return ToolFormat.LLAMA3_JSON
    return None


def call_id(tool_format: ToolFormat | None, result_id: UUID, place: int) -> str:
    """The id of a result's call: the same whenever it is told.

    Mistral's templates take ids of nine letters and digits only, and see it again.
    """
    if tool_format is ToolFormat.MISTRAL:
        return hashlib.sha256(f"{result_id}:{place}".encode()).hexdigest()[:9]
    return f"call_{result_id.hex}{place}"


def read_all(reader: Reader, text: str) -> tuple[str, list[ToolCall]]:
    """A whole text, as its words and its calls."""
    # In pieces: what is given up again and again would otherwise be copied with all behind it.
    slices = (text[at : at + _SLICE] for at in range(0, len(text), _SLICE))
    pieces = [piece for one in slices for piece in reader.feed(one)] + reader.finish()
    words = "".join(piece for piece in pieces if isinstance(piece, str))
    return words, [piece for piece in pieces if isinstance(piece, ToolCall)]


def reader_of(tool_format: ToolFormat) -> Reader:
    """A new reader of one format."""
    return _CallReader(_STYLES[tool_format])


def reader_of_forced() -> Reader:
    """Reads what `required` forces by a schema: a JSON list of calls."""
    return _CallReader(_FORCED)


class NamedReader:
    """Reads what a named tool forces by its schema: the arguments alone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        self._pieces.append(text)
        return []

    def finish(self) -> list[Piece]:
        return [ToolCall(self._name, "".join(self._pieces))]


@dataclass(slots=True, frozen=True)
class _Style:
    opens: str  # what comes before calls; empty: they begin with the text
    closes: str  # what must follow each
    skipped: tuple[str, ...]  # what may stand between them
    has_names: bool = False  # before the arguments instead of inside


_STYLES = {
    ToolFormat.HERMES: _Style("<tool_call>", "</tool_call>", ()),
    ToolFormat.LLAMA3_JSON: _Style("", "", (";", "<|python_tag|>")),
    ToolFormat.MISTRAL: _Style("[TOOL_CALLS]", "", ("[TOOL_CALLS]", "[", ",", "]"), has_names=True),
}
_FORCED = _Style("", "", ("[", ",", "]"))


class _ObjectScan:
    """Finds the end of the JSON object that begins at `start`, looking at each character once."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._at = start
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def find_end(self, text: str) -> int | None:
        """The place behind the object, or None while it is not in `text`, which only grows."""
        while self._end is None and self._at < len(text):
            character = text[self._at]
            if self._in_string:
                if character == "\\":
                    self._at += 1  # whatever follows is escaped
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if not self._depth:
                    self._end = self._at + 1
            self._at += 1
        return self._end


class _CallReader:
    """Holds back only what may become a call, and the space around it."""

    def __init__(self, style: _Style) -> None:
        self._style = style
        self._buffer = ""
        self._at = 0  # how far the buffer was read, inside calls
        self._scan: _ObjectScan | None = None
        self._name: str | None = None
        self._space = ""  # behind text: dropped before a call
        self._has_calls = False
        self._after_call = False  # no text since the last one
        self._step: Callable[[list[Piece]], bool] = (
            self._read_text if style.opens else self._read_calls
        )

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        told: list[Piece] = []
        while self._step(told):
            pass
        return told

    def finish(self) -> list[Piece]:
        told: list[Piece] = []
        if self._scan is not None:
            self._finish_call(told)
        at = self._step_over(self._buffer, 0, is_whole=True) if self._has_calls else 0
        if at < len(self._buffer):
            self._tell(self._buffer, told)
        if self._space and not self._has_calls:
            told.append(self._space)
        self._buffer = self._space = ""
        return told

    def _read_text(self, told: list[Piece]) -> bool:
        """Tell text up to the next opening; True when there is more to do."""
        opens = self._style.opens
        place = self._buffer.find(opens)
        if place >= 0:
            self._tell(self._buffer[:place], told)
            self._buffer, self._at = self._buffer[place:], len(opens)
            self._step = self._read_calls
            return True
        held = _overlap(self._buffer, opens)
        self._tell(self._buffer[: len(self._buffer) - held], told)
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _read_rest(self, told: list[Piece]) -> bool:
        """Tell everything: no calls follow."""
        self._tell(self._buffer, told)
        self._buffer = ""
        return False

    def _read_calls(self, told: list[Piece]) -> bool:
        """Read one call; True when there is more to do."""
        if self._scan is None:
            self._at, rest = self._skip(self._buffer, self._at)
            if not rest:
                return False
            if not self._find_object(rest):
                return self._give_up(told)
        assert self._scan is not None
        end = self._scan.find_end(self._buffer)
        if end is None:
            return False
        behind = end + len(self._buffer[end:]) - len(self._buffer[end:].lstrip(_SPACE))
        closes = self._style.closes
        if closes and not self._buffer.startswith(closes, behind):
            if closes.startswith(self._buffer[behind:]):
                return False  # the rest of it may follow
            return self._give_up(told)
        return self._take(end, behind + len(closes) if closes else end, told)

    def _find_object(self, rest: str) -> bool:
        """Begin to scan the object that a call begins with, or that follows its name."""
        if rest.startswith("{"):
            self._name, self._scan = None, _ObjectScan(self._at)
            return True
        if self._style.has_names and (match := _NAME_BEFORE.match(rest)):
            self._name, self._scan = match[1], _ObjectScan(self._at + match.end())
            return True
        return False

    def _take(self, end: int, behind: int, told: list[Piece]) -> bool:
        assert self._scan is not None
        call = _to_call(self._buffer[self._scan.start : end], self._name)
        if call is None:
            return self._give_up(told)
        told.append(call)
        self._has_calls = self._after_call = True
        self._space = ""
        self._scan = None
        self._buffer, self._at = self._buffer[behind:], 0
        if self._style.closes:
            self._step = self._read_text
        return True

    def _finish_call(self, told: list[Piece]) -> None:
        """At the text's end the closing may be missing."""
        assert self._scan is not None
        end = self._scan.find_end(self._buffer)
        if end is not None:
            behind = self._buffer[end:].strip(_SPACE)
            if self._style.closes.startswith(behind):
                self._take(end, len(self._buffer), told)
        self._scan = None

    def _give_up(self, told: list[Piece]) -> bool:
        """What looked like a call is text."""
        self._scan = None
        opens = self._style.opens
        if self._has_calls and not (opens and self._buffer.startswith(opens)):
            self._buffer, self._at = self._buffer[self._at :], 0  # without the separators
        if not opens:
            self._step = self._read_rest
            return True
        # Only the opening is known to be text: a call may follow it.
        length = len(opens) if self._buffer.startswith(opens) else 0
        self._tell(self._buffer[:length], told)
        self._buffer, self._at = self._buffer[length:], 0
        self._step = self._read_text
        return True

    def _skip(self, text: str, at: int) -> tuple[int, str]:
        """Step over what may stand between calls; what follows it, empty while unknown."""
        at = self._step_over(text, at)
        rest = text[at:]
        if self._may_become_skipped(rest):
            return at, ""
        if self._style.has_names and _BEGINS_NAME.match(rest):
            return at, ""
        return at, rest

    def _step_over(self, text: str, at: int, *, is_whole: bool = False) -> int:
        while True:
            while at < len(text) and text[at] in _SPACE:
                at += 1
            if not is_whole and self._may_become_skipped(text[at:]):
                return at
            found = next((one for one in self._style.skipped if text.startswith(one, at)), None)
            if found is None:
                return at
            at += len(found)

    def _may_become_skipped(self, rest: str) -> bool:
        return any(len(rest) < len(one) and one.startswith(rest) for one in self._style.skipped)

    def _tell(self, text: str, told: list[Piece]) -> None:
        """Text, without the space that may stand beside a call."""
        if self._after_call:
            text = text.lstrip(_SPACE)
        if not text:
            return
        bare = text.rstrip(_SPACE)
        if bare:
            told.append(self._space + bare)
            self._space, self._after_call = text[len(bare) :], False
        else:
            self._space += text


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def _to_call(text: str, name: str | None) -> ToolCall | None:
    """A call from its JSON; None if it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        arguments: Any = value
        if name is None:
            name = value.get("name")
            key = next((key for key in _ARGUMENT_KEYS if key in value), None)
            arguments = {} if key is None else value[key]
            if isinstance(arguments, str):  # some models encode them twice
                arguments = json.loads(arguments, parse_constant=_refuse_constant)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        name.encode()
        return ToolCall(name, _to_text(arguments))
    except (ValueError, RecursionError):
        return None


def _to_text(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair can only be told escaped
        return json.dumps(arguments, allow_nan=False)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
