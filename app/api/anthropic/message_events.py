"""Events of a streamed message: https://docs.anthropic.com/en/api/messages-streaming"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson

from app.api.anthropic.messages import MessageShape, call_to_wire, open_block, signature_of
from app.api.errors.anthropic_errors import error_body
from app.core.errors import ServiceError
from app.inference.reasoning import Piece
from app.inference.tool_calls import ToolCall
from app.results.rows import ResultRow


def encode(kind: str, /, **members: Any) -> bytes:
    data = orjson.dumps({"type": kind, **members})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


PING = encode("ping")


def error_event(error: ServiceError) -> bytes:
    return b"event: error\ndata: %b\n\n" % orjson.dumps(error_body(error))


class MessageEvents:
    """Encoder of one message's events: its blocks one after another, then its end."""

    def __init__(self, shape: MessageShape, result_id: UUID) -> None:
        self._shape = shape
        self._result_id = result_id
        self._blocks = shape.new_blocks()
        self._index = -1  # of the last block
        self._open = ""  # type of the block that is open: text or thinking
        self._calls = 0

    def begin(self) -> bytes:
        return encode("message_start", message=self._shape.heading(self._result_id)) + PING

    def text(self, text: str) -> bytes:
        """The events of more text; a call is sent when it is complete."""
        return self._encode(self._blocks.feed(text))

    def end(self, row: ResultRow) -> bytes:
        frames = self._encode(self._blocks.finish(row)) + self._close()
        ending = self._shape.ending(row, self._calls)
        frames += encode("message_delta", delta=ending, usage=self._shape.usage_of(row))
        return frames + encode("message_stop")

    def _encode(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, ToolCall):
            return self._close() + self._call(piece)
        block, name, text = open_block(self._result_id, piece)
        kind, frames = block["type"], b""
        if kind != self._open:
            frames = self._close()
            self._open = kind
            frames += self._start(block | {"signature": ""} if name == "thinking" else block)
        return frames + self._delta({"type": f"{kind}_delta", name: text})

    def _call(self, call: ToolCall) -> bytes:
        block = call_to_wire(self._shape, self._result_id, self._calls, call)
        self._calls += 1
        arguments = orjson.dumps(block["input"]).decode()
        frames = self._start(block | {"input": {}})
        frames += self._delta({"type": "input_json_delta", "partial_json": arguments})
        return frames + encode("content_block_stop", index=self._index)

    def _close(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        frames = b""
        if kind == "thinking":
            signature = signature_of(self._result_id)
            frames = self._delta({"type": "signature_delta", "signature": signature})
        return frames + encode("content_block_stop", index=self._index)

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return encode("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return encode("content_block_delta", index=self._index, delta=delta)
