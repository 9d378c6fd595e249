"""Responses of chat completions: messages, choices and chunks."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson

from app.api.logprobs import encoded, logprob_of
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.chat_tools import ToolUse
from app.api.openai.schemas import Frames, answer_to_wire, likeliest, sampled_of
from app.inference.tool_calls import Piece, ToolCall, call_id, read_all
from app.results.rows import ResultRow


def chat_completion(
    request: ChatRequest, use: ToolUse | None, rows: Sequence[ResultRow]
) -> dict[str, Any]:
    heading = request.heading(rows[0].id, "chatcmpl", "chat.completion")
    choices = [_choice(request, use, place, row) for place, row in enumerate(rows)]
    return answer_to_wire(heading, choices, rows, len(rows))


def _choice(
    request: ChatRequest, use: ToolUse | None, place: int, row: ResultRow
) -> dict[str, Any]:
    message, finish_reason = chat_message(use, row)
    logprobs = None
    if request.logprobs:
        logprobs = encoded(_logprobs(row.token_logprobs(), request.top_logprobs or 0))
    return {
        "index": place,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def chat_message(use: ToolUse | None, row: ResultRow) -> tuple[dict[str, Any], str | None]:
    """A completed result as the assistant's message, and its finish reason."""
    text, reason = row.text, row.finish_reason
    if use is None:
        return {"role": "assistant", "content": text, "refusal": None}, reason
    words, calls = read_all(use.new_reader(), text)
    calls = calls if use.is_parallel else calls[:1]
    message: dict[str, Any] = {"role": "assistant", "content": words or None, "refusal": None}
    if calls:
        message["tool_calls"] = [
            call_to_wire(call_id(use.tool_format, row.id, number), call)
            for number, call in enumerate(calls)
        ]
    elif not words:
        message["content"] = ""
    return message, use.finish_reason(reason, len(calls))


def call_to_wire(identifier: str, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": identifier, "type": "function", "function": function}


def token_logprobs(tokens: Sequence[dict[str, dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    """Log probabilities of a text's tokens, each with the `count` most likely ones."""
    content = []
    for token in tokens:
        if token:
            entry = _token(sampled_of(token))
            entry["top_logprobs"] = [_token(one) for one in likeliest(token, count)]
            content.append(entry)
    return content


def _logprobs(tokens: Sequence[dict[str, dict[str, Any]]], count: int) -> dict[str, Any]:
    return {"content": token_logprobs(tokens, count), "refusal": None}


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    text = entry["decoded_token"] or ""
    # A token may be a part of a character; the engine does not return its bytes.
    encoded = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob_of(entry), "bytes": encoded}


class ChatFrames(Frames):
    _AROUND_TEXT = b'"delta":{"content":', b"}"

    def __init__(self, request: ChatRequest, use: ToolUse | None, ids: Sequence[UUID]) -> None:
        heading = request.heading(ids[0], "chatcmpl", "chat.completion.chunk")
        super().__init__(heading, request, ids, len(ids))
        self._use = use
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._readers = [use.new_reader() for _ in ids] if use else []
        self._calls = [0] * len(ids)

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(place, role) for place in range(len(self._ids)))

    def delta(self, place: int, text: str, tokens: Sequence[Any]) -> bytes:
        """Chunks for more text; a call is sent when it is complete."""
        logprobs = None if self._top is None else _logprobs(tokens, self._top)
        if self._use is None:
            if logprobs is not None:
                return self._chunk(place, {"content": text}, logprobs)
            return self._before_text[place] + orjson.dumps(text) + self._behind_text
        pieces = self._readers[place].feed(text)
        if not pieces and logprobs and logprobs["content"]:
            pieces = [""]
        return self._chunks(place, pieces, logprobs)

    def end(self, place: int, row: ResultRow) -> bytes:
        frames, reason = b"", row.finish_reason
        if self._use is not None:
            logprobs = None if self._top is None else _logprobs((), 0)
            frames = self._chunks(place, self._readers[place].finish(), logprobs)
            reason = self._use.finish_reason(reason, self._calls[place])
        return frames + self._chunk(place, {}, None, reason)

    def _chunks(self, place: int, pieces: Sequence[Piece], logprobs: Any) -> bytes:
        """Chunks of text and calls; the first one carries the log probabilities."""
        frames = b""
        for piece in pieces:
            delta: dict[str, Any] = {"content": piece}
            if isinstance(piece, ToolCall):
                number = self._calls[place]
                if number and self._use and not self._use.is_parallel:
                    continue
                self._calls[place] += 1
                tool_format = self._use.tool_format if self._use else None
                identifier = call_id(tool_format, self._ids[place], number)
                delta = {"tool_calls": [{"index": number, **call_to_wire(identifier, piece)}]}
            frames += self._chunk(place, delta, logprobs)
            logprobs = None
        return frames

    def _chunk(
        self, place: int, delta: object, logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {
            "index": place,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._encode(choice)
