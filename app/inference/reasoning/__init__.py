"""Reasoning inside a model's text: detection of its format by the chat template, and an incremental split.

    use = await prompt_format.reasoning_use(arguments)  # None: the text has no reasoning
    reader = OutputReader(use, tool_reader)  # either may be None
    pieces = reader.feed(text) + reader.finish()  # Reasoning, str (content) and ToolCall, in order

A format is one module: its marker in templates, its reader, and a member of `ReasoningFormat` here.
Stored texts stay as the model wrote them; each reading splits them again.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.inference.reasoning import cohere, harmony, mistral, seed, think
from app.inference.reasoning.reader import Format, Piece, Reasoning, ReasoningReader
from app.inference.tool_calls import Reader

__all__ = [
    "OutputReader",
    "Piece",
    "Reasoning",
    "ReasoningFormat",
    "ReasoningReader",
    "ReasoningUse",
    "detect_reasoning",
    "read_output",
]


class ReasoningFormat(StrEnum):
    """A model's notation of reasoning. Detection tries them in this order."""

    definition: Format

    def __new__(cls, definition: Format) -> "ReasoningFormat":
        member = str.__new__(cls, definition.name)
        member._value_ = definition.name
        member.definition = definition
        return member

    HARMONY = harmony.FORMAT
    SEED = seed.FORMAT
    COHERE = cohere.FORMAT
    MISTRAL = mistral.FORMAT
    THINK = think.FORMAT


@dataclass(slots=True, frozen=True)
class ReasoningUse:
    """Rules to split one request's results.

    `is_open`: the prompt ends inside of reasoning, so that the text begins with it. `ends` are the
    openings of tool calls that end reasoning whose closing tag the model left out.
    """

    format: ReasoningFormat
    is_open: bool = False
    ends: tuple[str, ...] = ()

    def new_reader(self) -> ReasoningReader:
        return self.format.definition.new_reader(self.is_open, self.ends)

    def to_stored(self) -> dict[str, Any]:
        return {"format": self.format.value, "is_open": self.is_open, "ends": self.ends}

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "ReasoningUse":
        ends = tuple(stored["ends"])
        return cls(ReasoningFormat(stored["format"]), stored["is_open"], ends)


class OutputReader:
    """Reads a model's text: first its reasoning, then the tool calls in the content.

    The joined pieces do not depend on the cuts of the text. Each character is read a bounded number
    of times, and only text that may become a tag or a call is held back.
    """

    def __init__(self, reasoning: ReasoningUse | None, tools: Reader | None) -> None:
        self._reasoning = reasoning.new_reader() if reasoning else None
        self._tools = tools

    def feed(self, text: str) -> list[Piece]:
        if self._reasoning is None:
            return self._read_content(text)
        return self._read_calls(self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        pieces = self._read_calls(self._reasoning.finish()) if self._reasoning else []
        return pieces + list(self._tools.finish()) if self._tools else pieces

    def _read_calls(self, pieces: list[Piece]) -> list[Piece]:
        read: list[Piece] = []
        for piece in pieces:
            read += self._read_content(piece) if isinstance(piece, str) else [piece]
        return read

    def _read_content(self, text: str) -> list[Piece]:
        if self._tools is None:
            return [text] if text else []
        return list(self._tools.feed(text))


def detect_reasoning(template: str) -> ReasoningFormat | None:
    return next((one for one in ReasoningFormat if one.definition.is_taught_by(template)), None)


def read_output(reader: OutputReader, text: str) -> tuple[str, list[Piece]]:
    """The reasoning of a whole text, joined, and its other pieces."""
    pieces = reader.feed(text) + reader.finish()
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, [piece for piece in pieces if not isinstance(piece, Reasoning)]
