"""Messages from results: content blocks, the reason of their end, usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict

from app.api.anthropic.schemas import MessageRequest
from app.api.anthropic.stop_sequences import StopFilter, matched_stop
from app.api.output_rules import OutputRules
from app.api.tool_arguments import parse_arguments
from app.inference.reasoning import Piece, Reasoning
from app.inference.tool_calls import ToolCall, call_id
from app.results.rows import ResultRow

# Members that the schema requires, of features that this service does not have.
_NO_DETAILS = {"stop_details": None, "container": None}


class MessageRead(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: dict[str, Any]


class TokenCountRead(BaseModel):
    input_tokens: int


@dataclass(slots=True, frozen=True)
class MessageShape:
    """Everything of a request that its message depends on."""

    model: str
    max_tokens: int
    stops: Sequence[str]
    rules: OutputRules
    shows_thinking: bool = True

    @classmethod
    def of(cls, request: MessageRequest, model: str, rules: OutputRules) -> "MessageShape":
        stops = request.stop_sequences or ()
        return cls(model, request.max_tokens, stops, rules, request.shows_thinking)

    def heading(self, result_id: UUID) -> dict[str, Any]:
        """A message before its first text."""
        return {
            "id": to_message_id(result_id),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **_NO_DETAILS,
            "usage": _usage(0, 0),
        }

    def new_blocks(self) -> "BlockReader":
        return BlockReader(self)

    def usage_of(self, row: ResultRow) -> dict[str, Any]:
        usage = _usage(row.prompt_tokens or 0, row.completion_tokens or 0)
        thoughts = self.rules.reasoning_tokens(row)
        if thoughts is not None:
            usage["output_tokens_details"] = {"thinking_tokens": thoughts}
        return usage

    def ending(self, row: ResultRow, calls: int) -> dict[str, Any]:
        """Why a completed result with this number of calls ended."""
        stop = matched_stop(row.text, row.finish_reason, self.stops)
        reason = "end_turn"
        if row.finish_reason == "length":
            max_tokens = orjson.loads(row.parameters)["max_tokens"]
            is_cut = max_tokens < self.max_tokens  # the model's length left no more
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif calls:
            reason = "tool_use"
        elif stop is not None:
            reason = "stop_sequence"
        stopped = stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stopped} | _NO_DETAILS


def message_to_wire(shape: MessageShape, row: ResultRow) -> dict[str, Any]:
    """A completed result as a message."""
    blocks = shape.new_blocks()
    content: list[dict[str, Any]] = []
    calls = 0
    for kind, pieces in groupby(blocks.feed(row.text) + blocks.finish(row), type):
        if kind is ToolCall:
            for call in pieces:
                content.append(call_to_wire(shape, row.id, calls, cast(ToolCall, call)))
                calls += 1
            continue
        opened = [open_block(row.id, cast(str | Reasoning, piece)) for piece in pieces]
        block, name, _ = opened[0]
        content.append(block | {name: "".join(text for _, _, text in opened)})
    ending = shape.ending(row, calls) | {"usage": shape.usage_of(row)}
    return shape.heading(row.id) | {"content": content} | ending


def open_block(result_id: UUID, piece: str | Reasoning) -> tuple[dict[str, Any], str, str]:
    """An empty block for a piece, the name of the member that the text goes to, and the text."""
    if isinstance(piece, str):
        return {"type": "text", "text": "", "citations": None}, "text", piece
    block = {"type": "thinking", "thinking": "", "signature": signature_of(result_id)}
    return block, "thinking", piece.text


def signature_of(result_id: UUID) -> str:
    """The signature of thoughts: clients require one; it names the result, and is not checked."""
    return str(result_id)


def call_to_wire(
    shape: MessageShape, result_id: UUID, number: int, call: ToolCall
) -> dict[str, Any]:
    """A `tool_use` block. Arguments that are no JSON object, as of a call that was cut, are none."""
    tools = shape.rules.tools
    tool_format = tools.tool_format if tools else None
    identifier = call_id(tool_format, result_id, number).replace("call_", "toolu_", 1)
    arguments = parse_arguments(call.arguments) or {}
    return {
        "type": "tool_use",
        "id": identifier,
        "name": call.name,
        "input": arguments,
        "caller": {"type": "direct"},
    }


def to_message_id(result_id: UUID) -> str:
    return f"msg_{result_id}"


class BlockReader:
    """Reads a growing text into thoughts, texts and calls; white space alone is no block."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._filter = StopFilter(shape.stops)
        self._reader = shape.rules.new_reader()
        self._calls = 0
        self._kind: type | None = None  # of the block that is open
        self._space: list[str] = []  # before the first other character of a block
        self._space_kind: type | None = None

    def feed(self, text: str) -> list[Piece]:
        return self._kept(self._reader.feed(self._filter.feed(text)))

    def finish(self, row: ResultRow) -> list[Piece]:
        stop = matched_stop(row.text, row.finish_reason, self._shape.stops)
        rest = self._reader.feed(self._filter.finish(stop))
        return self._kept(rest + self._reader.finish())

    def _kept(self, pieces: Sequence[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._kind, self._space = None, []
                if self._shape.rules.accepts_call(self._calls):
                    kept.append(piece)
                self._calls += 1
            elif isinstance(piece, str):
                kept += self._text(str, piece)
            elif self._shape.shows_thinking:
                kept += [Reasoning(text) for text in self._text(Reasoning, piece.text)]
        return kept

    def _text(self, kind: type, text: str) -> list[str]:
        """The text for the block of this kind, as soon as there is more than white space."""
        if self._space_kind is not kind:
            self._space, self._space_kind = [], kind
        if self._kind is not kind and not text.strip():
            self._space.append(text)
            return []
        text, self._space = "".join([*self._space, text]), []
        self._kind = kind
        return [text] if text else []


def _usage(input_tokens: int, output_tokens: int) -> dict[str, Any]:
    # The engine reports no use of its cache. Anthropic's schema requires each member.
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "server_tool_use": None,
        "inference_geo": None,
        "service_tier": "standard",
    }
