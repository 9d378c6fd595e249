"""Tool calls inside a model's text: detection of the format that a chat template teaches, and parsing.

A format is one module: its parser, its marker in templates, and a member of `ToolFormat` here. Text
that resembles a call and is not one stays text.
"""

import hashlib
from enum import StrEnum
from uuid import UUID

from app.inference.tool_calls import (
    deepseek_v3,
    deepseek_v31,
    glm,
    harmony,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    qwen_xml,
    seed_xml,
)
from app.inference.tool_calls.reader import (
    CallReader,
    Format,
    NamedReader,
    Reader,
    read_all,
    reader_of_forced,
)
from app.inference.tool_calls.source import Piece, Schemas, ToolCall

__all__ = [
    "NamedReader",
    "Piece",
    "Reader",
    "Schemas",
    "ToolCall",
    "ToolFormat",
    "call_id",
    "detect_format",
    "read_all",
    "reader_of",
    "reader_of_forced",
]


class ToolFormat(StrEnum):
    """A model's notation of tool calls, fixed by its training. Detection tries them in this order."""

    definition: Format

    def __new__(cls, definition: Format) -> "ToolFormat":
        member = str.__new__(cls, definition.name)
        member._value_ = definition.name
        member.definition = definition
        return member

    HARMONY = harmony.FORMAT
    MISTRAL = mistral.FORMAT
    DEEPSEEK_V3 = deepseek_v3.FORMAT
    DEEPSEEK_V31 = deepseek_v31.FORMAT
    SEED_XML = seed_xml.FORMAT
    QWEN_XML = qwen_xml.FORMAT
    GLM = glm.FORMAT
    HERMES = hermes.FORMAT
    PYTHONIC = pythonic.FORMAT
    LLAMA3_JSON = llama3_json.FORMAT


def detect_format(template: str) -> ToolFormat | None:
    return next((one for one in ToolFormat if one.definition.is_taught_by(template)), None)


def reader_of(tool_format: ToolFormat, schemas: Schemas | None = None) -> Reader:
    """A reader of a format; formats without types take those of the arguments from the schemas."""
    return CallReader(tool_format.definition.parse, schemas)


def call_id(tool_format: ToolFormat | None, result_id: UUID, place: int) -> str:
    """The id of a result's call, the same at each reading.

    Mistral's templates accept only ids of nine letters and digits.
    """
    if tool_format is ToolFormat.MISTRAL:
        return hashlib.sha256(f"{result_id}:{place}".encode()).hexdigest()[:9]
    return f"call_{result_id.hex}{place}"
