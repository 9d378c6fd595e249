"""Readers of tool calls: they accept a model's text in pieces and return text and calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from app.inference.tool_calls.source import Parsing, Piece, Source, ToolCall

_SLICE = 4096  # characters


class Reader(Protocol):
    """The pieces that a reader returns do not depend on the cuts of the text."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The last pieces, at the text's end."""
        ...


@dataclass(slots=True, frozen=True)
class Format:
    """One notation of tool calls."""

    name: str
    is_taught_by: Callable[[str], bool]  # given a chat template
    parse: Callable[[Source], Parsing[None]]


class CallReader:
    """Holds back only the text that may become a call, and the space around it."""

    def __init__(self, parse: Callable[[Source], Parsing[None]]) -> None:
        self._source = Source()
        self._parsing = parse(self._source)

    def feed(self, text: str) -> list[Piece]:
        self._source.buffer += text
        next(self._parsing, None)
        return self._source.take_pieces()

    def finish(self) -> list[Piece]:
        self._source.is_ended = True
        return self.feed("")


def read_all(reader: Reader, text: str) -> tuple[str, list[ToolCall]]:
    # In slices: each rejected opening copies the rest of the buffer.
    slices = (text[at : at + _SLICE] for at in range(0, len(text), _SLICE))
    pieces = [piece for one in slices for piece in reader.feed(one)] + reader.finish()
    words = "".join(piece for piece in pieces if isinstance(piece, str))
    return words, [piece for piece in pieces if isinstance(piece, ToolCall)]
