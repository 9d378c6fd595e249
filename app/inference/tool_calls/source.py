"""Incremental parsing of a text that arrives in pieces, into text and tool calls."""

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
# A step of a parser: it yields to wait for more text, and never after the text's end.
Parsing = Generator[None, None, _T]

_SPACE = " \t\r\n"
_LOOKAHEAD = 32  # characters; no separator is longer
_MAX_SKIPPED = 256  # characters of separators and space before, between and behind calls
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}
_IN_OBJECT, _IN_LIST = re.compile(r'["{}]'), re.compile(r"[\"'\[\](){}]")
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(slots=True, frozen=True)
class ToolCall:
    name: str
    arguments: str


Piece = str | ToolCall
# JSON schemas of the tools' arguments, by name.
Schemas = Mapping[str, Mapping[str, Any]]


class Source:
    """The text that is not emitted yet, and a parser's position in it.

    Space next to a call is not emitted. Each character of any text is scanned a bounded number of
    times: a rejected call is emitted with all that was read of it.
    """

    def __init__(self, schemas: Schemas | None = None) -> None:
        self.schemas = schemas or {}
        self.buffer = ""
        self.at = 0
        self.is_ended = False
        self._call_start = 0  # position behind the separators
        self._read_end = 0  # position behind the separators, or behind the object that follows them
        self._pieces: list[Piece] = []
        self._space: list[str] = []  # behind text: dropped before a call
        self._has_calls = False
        self._is_after_call = False  # no text since the last call

    def take_pieces(self) -> list[Piece]:
        if self.is_ended and self._space and not self._has_calls:
            self._pieces.append("".join(self._space))
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- reading --------------------------------------------------------------------------------

    def copy_until(self, *markers: str) -> Parsing[str]:
        """Emit text up to the next of the markers and step over that; empty if none follows."""
        while (found := _find(self.buffer, markers)) is None:
            held = 0 if self.is_ended else _overlap(self.buffer, markers)
            self.emit_text(len(self.buffer) - held)
            if self.is_ended:
                return ""
            yield
        place, marker = found
        self.emit_text(place)
        self.at = len(marker)
        return marker

    def read_until(self, *markers: str) -> Parsing[tuple[str, str]]:
        """The text up to the next of the markers, and the marker, which is empty if none follows."""
        # Scanned text is set aside, as in `read_object`.
        held, begins = [self.buffer[: self.at]], self.at
        self.buffer = self.buffer[self.at :]
        while (found := _find(self.buffer, markers)) is None and not self.is_ended:
            kept = _overlap(self.buffer, markers)
            held.append(self.buffer[: len(self.buffer) - kept])
            self.buffer = self.buffer[len(self.buffer) - kept :]
            yield
        place, marker = found or (len(self.buffer), "")
        end = sum(map(len, held)) + place
        self.buffer = "".join(held) + self.buffer
        self.at = self._read_end = end + len(marker)
        return self.buffer[begins:end], marker

    def copy_rest(self) -> Parsing[None]:
        while True:
            self.emit_text(len(self.buffer))
            if self.is_ended:
                return
            yield

    def skip(self, separators: tuple[str, ...] = ()) -> Parsing[None]:
        """Step over separators and space, as far as they may belong to a call."""
        end = self.at + _MAX_SKIPPED
        while self.at < end:
            rest = self.buffer[self.at : self.at + _LOOKAHEAD]
            is_open = not rest or any(one != rest and one.startswith(rest) for one in separators)
            if is_open and not self.is_ended:
                yield
                continue
            found = next((one for one in (*separators, *_SPACE) if rest.startswith(one)), None)
            if found is None:
                break
            self.at += len(found)
        self._call_start = self._read_end = self.at

    def read_object(self) -> Parsing[str | None]:
        """The JSON text of an object, if one begins at this position; None also if it never ends."""
        text = yield from self._read_balanced("{", _IN_OBJECT)
        return text

    def read_list(self) -> Parsing[str | None]:
        """The text of a Python list, if one begins at this position; None also if it never ends."""
        text = yield from self._read_balanced("[", _IN_LIST)
        return text

    def _read_balanced(self, opening: str, pattern: re.Pattern[str]) -> Parsing[str | None]:
        """The text from an opening bracket to its end; `pattern` finds brackets and quotes."""
        if not self.buffer.startswith(opening, self.at):
            return None
        # Scanned text is set aside while more is awaited: the buffer is not copied with each piece.
        held, before, at, depth, quote = [""], self.at, self.at, 0, ""
        while True:
            found = (_IN_STRING[quote] if quote else pattern).search(self.buffer, at)
            if found is None:
                at = max(at, len(self.buffer)) - len(self.buffer)
                if not self.is_ended:
                    held.append(self.buffer)
                    self.buffer = ""
                    yield
                    continue
                self.buffer = "".join(held) + self.buffer
                return None
            character, at = found[0], found.end()
            if character == "\\":
                at += 1  # the next character is escaped
            elif character in "\"'":
                quote = "" if quote else character
            else:
                depth += 1 if character in "{[(" else -1
                if not depth:
                    break
        text = "".join(held)
        self.buffer = text + self.buffer
        self.at = self._read_end = len(text) + at
        return self.buffer[before : self.at]

    def close(self, marker: str) -> Parsing[bool]:
        """Step over space and a marker, which may be cut off or missing at the text's end."""
        yield from self.skip()
        while (rest := self.buffer[self.at : self.at + len(marker)]) != marker:
            if self.is_ended or not marker.startswith(rest):
                break
            yield
        self.at += len(rest)
        return marker.startswith(rest)

    # --- emitting -------------------------------------------------------------------------------

    def emit_text(self, length: int) -> None:
        text = self.buffer[:length]
        self.buffer, self.at = self.buffer[length:], 0
        if self._is_after_call:
            text = text.lstrip(_SPACE)
        bare = text.rstrip(_SPACE)
        if bare:
            self._pieces.append("".join(self._space) + bare)
            self._space, self._is_after_call = [], False
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def emit_call(self, call: ToolCall) -> None:
        self._pieces.append(call)
        self._has_calls = self._is_after_call = True
        self._space = []
        self.buffer, self.at = self.buffer[self.at :], 0

    def reject(self, opening: str) -> None:
        """Emit a rejected call as text, with its opening; at the text's end, all text."""
        is_ended = self.is_ended
        self.emit_text(len(self.buffer) if is_ended else max(len(opening), self._read_end))

    def end_calls(self, opening: str = "") -> None:
        """Drop the separators behind the last call; an opening that other text follows is text."""
        has_rest = self._call_start < len(self.buffer)
        is_opening = bool(opening) and self.buffer.startswith(opening)
        if self._has_calls and not (has_rest and is_opening):
            self.buffer, self.at = self.buffer[self._call_start :], 0
        else:
            self.reject(opening)


def parse_sequence(source: Source, separators: tuple[str, ...]) -> Parsing[None]:
    """Parse calls as JSON objects from the text's beginning; text may follow them."""
    while True:
        yield from source.skip(separators)
        call = to_call((yield from source.read_object()))
        if call is None:
            source.end_calls()
            yield from source.copy_rest()
            return
        source.emit_call(call)


def _find(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """The place of the first of the markers, and that marker."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)


def _overlap(text: str, markers: tuple[str, ...]) -> int:
    """The number of characters at the end of `text` that may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def to_call(text: str | None, name: str | None = None) -> ToolCall | None:
    """A call from its JSON text, which holds the arguments alone if the name is given; else None."""
    if text is None:
        return None
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
        return new_call(name, arguments)
    except (ValueError, RecursionError):
        return None


def new_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Raises ValueError if JSON, UTF-8 or the database cannot hold them."""
    if "\x00" in name:
        raise ValueError("NUL is in no name")
    name.encode()
    return ToolCall(name, _to_text(arguments))


def _to_text(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair has no UTF-8 form
        return json.dumps(arguments)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
