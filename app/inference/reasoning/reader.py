"""Readers of reasoning: they accept a model's text in pieces and return reasoning and content."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from app.inference.tool_calls.source import ToolCall

_SPACE = " \t\r\n"
_MAX_SPACE = 256  # characters before the opening tag


@dataclass(slots=True, frozen=True)
class Reasoning:
    """A part of the model's reasoning."""

    text: str


Piece = Reasoning | str | ToolCall


class ReasoningReader(Protocol):
    """The joined pieces that a reader returns do not depend on the cuts of the text."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The last pieces, at the text's end."""
        ...


@dataclass(slots=True, frozen=True)
class Format:
    """`opening` and `closing` are the tags in prompts; `new_reader` gets `is_open` and `ends`."""

    name: str
    opening: str
    closing: str
    is_taught_by: Callable[[str], bool]  # given a chat template
    new_reader: Callable[[bool, tuple[str, ...]], ReasoningReader]


class TagReader:
    """Reads reasoning between two tags, of which the prompt may have the first.

    Reasoning is at the text's beginning; with `reopens`, further openings begin more of it. Text in
    `frames`, which surrounds the content of some models, is left out. Reasoning that never ends is all
    of the text.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        is_open: bool,
        ends: tuple[str, ...] = (),
        *,
        reopens: bool = False,
        frames: tuple[str, ...] = (),
    ) -> None:
        self._opening, self._closing = opening, closing
        self._reasoning_marks = _Marks((closing, *ends))
        self._in_content = (*((opening,) if reopens else ()), *frames)
        self._content_marks = _Marks(self._in_content)
        self._buffer = ""  # not more than a tag and the space before it
        self._is_open = is_open
        self._is_start = True
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        if not self._is_start or self._read_start():
            self._read(is_end=False)
        return self._take()

    def finish(self) -> list[Piece]:
        self._is_start = False
        self._read(is_end=True)
        return self._take()

    def _read_start(self) -> bool:
        """Step over space and the opening tag; False while they may still come."""
        begins = len(self._buffer) - len(self._buffer.lstrip(_SPACE))
        rest = self._buffer[begins : begins + len(self._opening)]
        if begins <= _MAX_SPACE:
            if rest == self._opening:
                self._buffer = self._buffer[begins + len(rest) :]
                self._is_open = True
            elif self._opening.startswith(rest):
                return False
        self._is_start = False
        return True

    def _read(self, *, is_end: bool) -> None:
        at = 0
        while True:
            marks = self._reasoning_marks if self._is_open else self._content_marks
            begins, mark = marks.find(self._buffer, at)
            if mark is None:
                held = 0 if is_end else marks.overlap(self._buffer, at)
                self._emit(self._buffer[at : len(self._buffer) - held])
                self._buffer = self._buffer[len(self._buffer) - held :]
                return
            self._emit(self._buffer[at:begins])
            at = begins + len(mark)
            if self._is_open:
                self._is_open = False
                if (
                    mark != self._closing
                ):  # it belongs to the content; the closing tag may follow it
                    at = begins
                    self._content_marks = _Marks((*self._in_content, self._closing))
            elif mark == self._opening:
                self._is_open = True

    def _emit(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text) if self._is_open else text)

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


class _Marks:
    """Texts that are looked for together."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._longest = max(map(len, marks), default=0)

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """The place of the first mark from `at` on, and the mark."""
        found = self._pattern.search(text, at) if self._pattern else None
        return (found.start(), found[0]) if found else (len(text), None)

    def overlap(self, text: str, at: int) -> int:
        """The number of characters at the text's end that may be the beginning of a mark."""
        for length in range(min(len(text) - at, self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(mark.startswith(tail) for mark in self._marks):
                return length
        return 0
