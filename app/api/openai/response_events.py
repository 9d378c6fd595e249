"""Events of a response, with sequence numbers that are a function of the result alone.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from typing import Any
from uuid import UUID

import orjson

from app.api.openai.responses_output import (
    Status,
    bare_response,
    message_item,
    response_to_wire,
    text_part,
)
from app.api.openai.stored_responses import StoredRequest
from app.inference.tool_calls import Reader, ToolCall
from app.results.rows import ResultRow

# Sequence numbers of an attempt's events. A delta's is the prelude's count plus the offset of its
# text's end, so that the number states what its reader has, and any process computes the same.
_CREATED, _QUEUED, _IN_PROGRESS, _ITEM_ADDED, _PART_ADDED = range(5)
PRELUDE = 5
# Distance between the numbers of two attempts; greater than the length of any text.
ATTEMPT_STEP = 1_000_000_000


class ResponseEvents:
    """Encoder of one response's events; those up to the number `after` are left out."""

    def __init__(self, stored: StoredRequest, result_id: UUID, after: int = -1) -> None:
        self._stored = stored
        self._result_id = result_id
        self._item_id = f"msg_{result_id}"
        self._after = after
        self._last = max(after, _CREATED)  # the highest number that the reader has
        self.is_over = False
        self._base = 0
        self._reader: Reader | None = None
        self._emitted = 0  # code points of the deltas so far
        self._has_calls = False
        self._tail = 0  # the number of the last event
        self._new_reader()

    def begin(self) -> bytes:
        background = self._stored.background
        status: Status = "queued" if background else "in_progress"
        frames = self._response_event(_CREATED, "response.created", status)
        if background:
            frames += self._response_event(_QUEUED, "response.queued", "queued")
        return frames

    def attempt(self, number: int) -> bytes | None:
        """An attempt starts; None if the reader has text of an earlier one."""
        base = (number - 1) * ATTEMPT_STEP
        if (
            base > self._last - self._last % ATTEMPT_STEP
            and self._last % ATTEMPT_STEP >= _ITEM_ADDED
        ):
            return None
        self._base = base
        self._new_reader()
        return self._response_event(base + _IN_PROGRESS, "response.in_progress", "in_progress")

    def text(self, text: str) -> bytes:
        if self._reader is None:
            return self._text_delta(text)
        frames = b""
        for piece in self._reader.feed(text):
            self._has_calls = self._has_calls or isinstance(piece, ToolCall)
            if isinstance(piece, str) and not self._has_calls:
                frames += self._text_delta(piece)
        return frames

    def end(self, row: ResultRow) -> bytes:
        self.is_over = True
        self._tail = self._base + PRELUDE + len(row.text)
        response = response_to_wire(self._stored, row)
        frames = b""
        if row.state == "completed":
            for place, item in enumerate(response["output"]):
                is_message = item["type"] == "message"
                frames += self._close_message(item) if is_message else self._call(place, item)
        name = response["status"] if row.state == "completed" else "failed"
        return frames + self._emit(self._next(), f"response.{name}", response=response)

    def error(self, code: str, message: str) -> bytes:
        number = max(self._last + 1, self._base)
        return self._emit(number, "error", code=code, message=message, param=None)

    def restarted(self, attempt: int) -> bytes:
        """The last event of a stream whose text is discarded."""
        self._base = (attempt - 1) * ATTEMPT_STEP
        return self.error(
            "attempt_restarted",
            f"The model failed during its response, and attempt {attempt} starts from the prompt. Read "
            "the response again from its beginning.",
        )

    def _new_reader(self) -> None:
        use = self._stored.use
        self._reader = use.new_reader() if use else None
        self._emitted, self._has_calls = 0, False

    def _text_delta(self, text: str) -> bytes:
        if not text:
            return b""
        frames = b"" if self._emitted else self._open_message()
        known = self._after - self._base - PRELUDE - self._emitted
        self._emitted += len(text)
        return frames + self._delta(self._base + PRELUDE + self._emitted, text[max(0, known) :])

    def _delta(self, number: int, text: str) -> bytes:
        return self._emit(
            number, "response.output_text.delta", **self._place(), delta=text, logprobs=[]
        )

    def _open_message(self) -> bytes:
        item = message_item(self._result_id, "in_progress", [])
        return self._emit(
            self._base + _ITEM_ADDED, "response.output_item.added", output_index=0, item=item
        ) + self._emit(
            self._base + _PART_ADDED,
            "response.content_part.added",
            **self._place(),
            part=text_part(""),
        )

    def _close_message(self, item: dict[str, Any]) -> bytes:
        (part,) = item["content"]
        frames = b"" if self._emitted else self._open_message()
        if rest := part["text"][self._emitted :]:
            frames += self._delta(self._next(), rest)
        place, done = self._place(), {"text": part["text"], "logprobs": part["logprobs"]}
        frames += self._emit(self._next(), "response.output_text.done", **place, **done)
        frames += self._emit(self._next(), "response.content_part.done", **place, part=part)
        return frames + self._emit(
            self._next(), "response.output_item.done", output_index=0, item=item
        )

    def _call(self, place: int, item: dict[str, Any]) -> bytes:
        opened = item | {"arguments": "", "status": "in_progress"}
        at = {"output_index": place, "item_id": item["id"]}
        arguments = item["arguments"]
        name = "response.function_call_arguments"
        return (
            self._emit(self._next(), "response.output_item.added", output_index=place, item=opened)
            + self._emit(self._next(), f"{name}.delta", **at, delta=arguments)
            + self._emit(self._next(), f"{name}.done", **at, name=item["name"], arguments=arguments)
            + self._emit(self._next(), "response.output_item.done", output_index=place, item=item)
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _next(self) -> int:
        self._tail += 1
        return self._tail

    def _response_event(self, number: int, name: str, status: Status) -> bytes:
        if number <= self._after:  # before the response is built
            return b""
        response = bare_response(self._stored, self._result_id, status)
        return self._emit(number, name, response=response)

    def _emit(self, number: int, kind: str, /, **members: Any) -> bytes:
        if number <= self._after:
            return b""
        self._last = max(self._last, number)
        event = {"type": kind, "sequence_number": number, **members}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(event))
