"""Responses of chat completions: messages, choices and chunks."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson

from app.api.logprobs import encoded, logprob_of
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.schemas import Frames, answer_to_wire, likeliest, sampled_of
from app.api.openai.tool_forms import custom_input
from app.api.output_rules import OutputRules
from app.api.tool_use import ToolUse
from app.inference.reasoning import Piece, Reasoning
from app.inference.tool_calls import ToolCall, call_id
from app.results.rows import ResultRow


def chat_completion(
    request: ChatRequest, rules: OutputRules, rows: Sequence[ResultRow]
) -> dict[str, Any]:
    heading = request.heading(rows[0].id, "chatcmpl", "chat.completion")
    choices = [_choice(request, rules, place, row) for place, row in enumerate(rows)]
    counts = [rules.reasoning_tokens(row) for row in rows]
    count = None if None in counts else sum(filter(None, counts))
    answer = answer_to_wire(heading, choices, rows, len(rows), count)
    if rows[0].prompt_logprobs is not None:
        answer["prompt_logprobs"] = orjson.Fragment(rows[0].prompt_logprobs)
    return answer


def _choice(request: ChatRequest, rules: OutputRules, place: int, row: ResultRow) -> dict[str, Any]:
    message, finish_reason = chat_message(
        rules, row, with_reasoning=request.include_reasoning is not False
    )
    logprobs = None
    if request.logprobs:
        logprobs = encoded(_logprobs(row.token_logprobs(), request.top_logprobs or 0))
    return {
        "index": place,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def chat_message(
    rules: OutputRules, row: ResultRow, *, with_reasoning: bool = True
) -> tuple[dict[str, Any], str | None]:
    """A completed result as the assistant's message, and its finish reason."""
    if rules.is_plain:
        return _message(row.text), row.finish_reason
    output = rules.read(row.text)
    content = output.content or None
    reasoning = output.reasoning + output.late_reasoning
    message = _message(content)
    if rules.reasoning is not None and with_reasoning:
        message |= reasoning_to_wire(reasoning or None)
    if output.calls:
        message["tool_calls"] = [
            call_to_wire(_call_id(rules, row.id, number), call, rules.tools)
            for number, call in enumerate(output.calls)
        ]
    elif not output.content and not reasoning:
        message["content"] = ""
    return message, _finish_reason(rules, row.finish_reason, len(output.calls))


def _message(content: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "refusal": None, "annotations": []}


def reasoning_to_wire(text: str | None) -> dict[str, str | None]:
    """The name that most clients read, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _call_id(rules: OutputRules, result_id: UUID, number: int) -> str:
    return call_id(rules.tools.tool_format if rules.tools else None, result_id, number)


def _finish_reason(rules: OutputRules, reason: str | None, calls: int) -> str | None:
    return rules.tools.finish_reason(reason, calls) if rules.tools else reason


def call_to_wire(identifier: str, call: ToolCall, use: ToolUse | None) -> dict[str, Any]:
    if use is not None and call.name in use.forms:
        custom = {"name": call.name, "input": custom_input(call.arguments)}
        return {"id": identifier, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": identifier, "type": "function", "function": function}


def token_logprobs(
    tokens: Sequence[dict[str, dict[str, Any]]], count: int, no_bytes: list[int] | None = None
) -> list[dict[str, Any]]:
    """Log probabilities of a text's tokens, each with the `count` most likely ones.

    `no_bytes` stands for bytes that are not known.
    """
    content = []
    for token in tokens:
        if token:
            entry = _token(sampled_of(token), no_bytes)
            entry["top_logprobs"] = [_token(one, no_bytes) for one in likeliest(token, count)]
            content.append(entry)
    return content


def _logprobs(tokens: Sequence[dict[str, dict[str, Any]]], count: int) -> dict[str, Any]:
    return {"content": token_logprobs(tokens, count), "refusal": None}


def _token(entry: dict[str, Any], no_bytes: list[int] | None) -> dict[str, Any]:
    text = entry["decoded_token"] or ""
    # A token may be a part of a character; the engine does not return its bytes.
    encoded = no_bytes if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob_of(entry), "bytes": encoded}


class ChatFrames(Frames):
    _AROUND_TEXT = b'"delta":{"content":', b"}"

    def __init__(self, request: ChatRequest, rules: OutputRules, ids: Sequence[UUID]) -> None:
        heading = request.heading(ids[0], "chatcmpl", "chat.completion.chunk")
        super().__init__(heading, request, ids, len(ids))
        self._rules = rules
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._readers = [] if rules.is_plain else [rules.new_reader() for _ in ids]
        self._calls = [0] * len(ids)
        self._with_reasoning = request.include_reasoning is not False
        self._with_usage = request.include_usage

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(place, role) for place in range(len(self._ids)))

    def delta(self, place: int, text: str, tokens: Sequence[Any]) -> bytes:
        """Chunks for more text; a call is sent when it is complete."""
        logprobs = None if self._top is None else _logprobs(tokens, self._top)
        if self._rules.is_plain:
            return self._text_chunk(place, text, logprobs)
        pieces = self._readers[place].feed(text)
        if not pieces and logprobs and logprobs["content"]:
            pieces = [""]
        return self._chunks(place, pieces, logprobs)

    def end(self, place: int, row: ResultRow) -> bytes:
        frames, reason = b"", row.finish_reason
        if not self._rules.is_plain:
            logprobs = None if self._top is None else _logprobs((), 0)
            frames = self._chunks(place, self._readers[place].finish(), logprobs)
            reason = _finish_reason(self._rules, reason, self._calls[place])
        if self._with_usage and (count := self._rules.reasoning_tokens(row)) is not None:
            self._reasoning_tokens = (self._reasoning_tokens or 0) + count
        return frames + self._chunk(place, {}, None, reason)

    def _chunks(self, place: int, pieces: Sequence[Piece], logprobs: Any) -> bytes:
        """Chunks of reasoning, text and calls; the first one carries the log probabilities."""
        frames = []
        for piece in pieces:
            if isinstance(piece, str):
                frames.append(self._text_chunk(place, piece, logprobs))
            elif (delta := self._delta_of(place, piece)) is not None:
                frames.append(self._chunk(place, delta, logprobs))
            else:
                continue
            logprobs = None
        return b"".join(frames)

    def _delta_of(self, place: int, piece: Reasoning | ToolCall) -> dict[str, Any] | None:
        if isinstance(piece, Reasoning):
            return dict(reasoning_to_wire(piece.text)) if self._with_reasoning else None
        number = self._calls[place]
        if not self._rules.accepts_call(number):
            return None
        self._calls[place] += 1
        identifier = _call_id(self._rules, self._ids[place], number)
        return {
            "tool_calls": [{"index": number, **call_to_wire(identifier, piece, self._rules.tools)}]
        }

    def _text_chunk(self, place: int, text: str, logprobs: Any) -> bytes:
        if logprobs is not None:
            return self._chunk(place, {"content": text}, logprobs)
        return self._before_text[place] + orjson.dumps(text) + self._behind_text

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
