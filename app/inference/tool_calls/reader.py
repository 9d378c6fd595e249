"""Readers of tool calls: they accept a model's text in pieces and return text and calls."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from app.inference.tool_calls.source import (
    Parsing,
    Piece,
    Schemas,
    Source,
    ToolCall,
    parse_sequence,
)

_SLICE = 4096  # characters


class Reader(Protocol):
    """The pieces that a reader returns do not depend on the cuts of the text."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The last pieces, at the text's end."""
        ...


@dataclass(slots=True, frozen=True)
class Format:
    """`openings` end reasoning whose closing tag the model left out."""

    name: str
    is_taught_by: Callable[[str], bool]  # given a chat template
    parse: Callable[[Source], Parsing[None]]
    openings: tuple[str, ...] = ()


class CallReader:
    """Holds back only the text that may become a call, and the space around it."""

    def __init__(
        self, parse: Callable[[Source], Parsing[None]], schemas: Schemas | None = None
    ) -> None:
        self._source = Source(schemas)
        self._parsing = parse(self._source)

    def feed(self, text: str) -> list[Piece]:
        # In slices: each emission copies the rest of the buffer.
        for at in range(0, len(text), _SLICE):
            self._read(text[at : at + _SLICE])
        return self._source.take_pieces()

    def finish(self) -> list[Piece]:
        self._source.is_ended = True
        self._read("")
        return self._source.take_pieces()

    def _read(self, text: str) -> None:
        self._source.buffer += text
        next(self._parsing, None)


class NamedReader:
    """Reader of the arguments that a structured output forces for a named tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        self._pieces.append(text)
        return []

    def finish(self) -> list[Piece]:
        return [ToolCall(self._name, "".join(self._pieces))]


def reader_of_forced() -> Reader:
    """Reader of the list of calls that a structured output forces (`required`)."""
    return CallReader(partial(parse_sequence, separators=("[", ",", "]")))


def read_all(reader: Reader, text: str) -> tuple[str, list[ToolCall]]:
    pieces = reader.feed(text) + reader.finish()
    words = "".join(piece for piece in pieces if isinstance(piece, str))
    return words, [piece for piece in pieces if isinstance(piece, ToolCall)]
