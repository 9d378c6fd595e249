"""Calls that a structured output forces: the text is the JSON of calls, or of one call's arguments."""

from functools import partial

from app.inference.tool_calls.reader import CallReader, Reader
from app.inference.tool_calls.source import Piece, ToolCall, parse_sequence


def reader_of_forced() -> Reader:
    """Reader of the list of calls that `required` forces."""
    return CallReader(partial(parse_sequence, separators=("[", ",", "]")))


class NamedReader:
    """Reader of the arguments that a named tool forces."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        self._pieces.append(text)
        return []

    def finish(self) -> list[Piece]:
        return [ToolCall(self._name, "".join(self._pieces))]
