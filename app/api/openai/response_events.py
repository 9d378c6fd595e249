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
    reasoning_item,
    reasoning_part,
    response_to_wire,
    text_part,
)
from app.api.openai.stored_responses import StoredRequest
from app.inference.reasoning import OutputReader, Reasoning
from app.results.rows import ResultRow

# Sequence numbers of an attempt's events. A delta's is the prelude's count plus the offset of its
# text's end, so that the number states what its reader has, and any process computes the same. Behind
# reasoning, five events lie between its last delta and the first of the message.
_CREATED, _QUEUED, _IN_PROGRESS, _ITEM_ADDED, _PART_ADDED = range(5)
PRELUDE = 5
_BETWEEN_ITEMS = 5
# Distance between the numbers of two attempts; greater than the length of any text.
ATTEMPT_STEP = 1_000_000_000
# The events of a call's text, and the item's member that has it.
_CALL_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


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
        self._reader: OutputReader | None = None
        self._emitted = 0  # code points of the deltas so far, and the events between two items
        self._reasoning: list[str] = []  # as far as it is in deltas; its item is the first one
        self._content_size = 0  # code points of the message's deltas
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
            return self._content_delta(text)
        frames = []
        for piece in self._reader.feed(text):
            if isinstance(piece, Reasoning):
                # Reasoning behind the first content is an item at the end.
                if not self._content_size and not self._has_calls:
                    frames.append(self._reasoning_delta(piece.text))
            elif not isinstance(piece, str):
                self._has_calls = self._has_calls or self._stored.rules.accepts_call(0)
            elif not self._has_calls:
                frames.append(self._content_delta(piece))
        return b"".join(frames)

    def end(self, row: ResultRow) -> bytes:
        self.is_over = True
        self._tail = self._base + PRELUDE + len(row.text)
        if self._stored.rules.reasoning is not None:
            self._tail += _BETWEEN_ITEMS
        response = response_to_wire(self._stored, row)
        frames, name = [], "failed"
        if row.state == "completed":
            name = response["status"]
            frames = [self._end_item(*item) for item in enumerate(response["output"])]
        return b"".join([*frames, self._emit(self._next(), f"response.{name}", response=response)])

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
        rules = self._stored.rules
        self._reader = None if rules.is_plain else rules.new_reader()
        self._emitted, self._content_size, self._has_calls = 0, 0, False
        self._reasoning = []

    def _reasoning_delta(self, text: str) -> bytes:
        frames = b"" if self._reasoning else self._open_reasoning()
        self._reasoning.append(text)
        return frames + self._delta("response.reasoning_text.delta", self._reasoning_place(), text)

    def _content_delta(self, text: str) -> bytes:
        if not text:
            return b""
        frames = b""
        if not self._content_size:
            if self._reasoning:
                start = self._base + PRELUDE + self._emitted
                item = reasoning_item(self._result_id, "completed", "".join(self._reasoning))
                frames += self._close_reasoning(item, start)
                frames += self._open_message(start + 4)
                self._emitted += _BETWEEN_ITEMS
            else:
                frames += self._open_message(self._base + _ITEM_ADDED)
        self._content_size += len(text)
        return frames + self._delta("response.output_text.delta", self._place(), text, logprobs=[])

    def _delta(self, name: str, place: dict[str, Any], text: str, **members: Any) -> bytes:
        """More text of an item, without that which the reader has."""
        known = self._after - self._base - PRELUDE - self._emitted
        self._emitted += len(text)
        number = self._base + PRELUDE + self._emitted
        return self._emit(number, name, **place, delta=text[max(0, known) :], **members)

    def _open_reasoning(self) -> bytes:
        item = reasoning_item(self._result_id, "in_progress", None)
        return self._open(
            self._base + _ITEM_ADDED, self._reasoning_place(), item, reasoning_part("")
        )

    def _open_message(self, number: int) -> bytes:
        item = message_item(self._result_id, "in_progress", [])
        return self._open(number, self._place(), item, text_part(""))

    def _open(
        self, number: int, place: dict[str, Any], item: dict[str, Any], part: dict[str, Any]
    ) -> bytes:
        index = place["output_index"]
        return self._emit(
            number, "response.output_item.added", output_index=index, item=item
        ) + self._emit(number + 1, "response.content_part.added", **place, part=part)

    def _close_reasoning(self, item: dict[str, Any], number: int) -> bytes:
        """Three events from a number on."""
        (part,) = item["content"]
        place = self._reasoning_place()
        return (
            self._emit(number + 1, "response.reasoning_text.done", **place, text=part["text"])
            + self._emit(number + 2, "response.content_part.done", **place, part=part)
            + self._emit(number + 3, "response.output_item.done", output_index=0, item=item)
        )

    def _end_item(self, place: int, item: dict[str, Any]) -> bytes:
        """The events of an item that are left at the result's end."""
        if item["type"] == "message":
            return self._close_message(item)
        if item["type"] in _CALL_EVENTS:
            return self._call(place, item)
        if item["id"] == self._reasoning_place()["item_id"]:
            return b"" if self._content_size else self._end_reasoning(item)
        return self._late_reasoning(place, item)

    def _end_reasoning(self, item: dict[str, Any]) -> bytes:
        """Reasoning that no content of the stream has closed."""
        place, text = self._reasoning_place(), item["content"][0]["text"]
        frames = b"" if self._reasoning else self._open_reasoning()
        if rest := text[len("".join(self._reasoning)) :]:
            frames += self._emit(self._next(), "response.reasoning_text.delta", **place, delta=rest)
        self._reasoning = [text]
        frames += self._close_reasoning(item, self._tail)
        self._tail += 3
        return frames

    def _late_reasoning(self, output_index: int, item: dict[str, Any]) -> bytes:
        (part,) = item["content"]
        place = {"item_id": item["id"], "output_index": output_index, "content_index": 0}
        opened = item | {"status": "in_progress", "content": []}
        name = "response.reasoning_text"
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.output_item.added", {"output_index": output_index, "item": opened}),
            ("response.content_part.added", place | {"part": reasoning_part("")}),
            (f"{name}.delta", place | {"delta": part["text"]}),
            (f"{name}.done", place | {"text": part["text"]}),
            ("response.content_part.done", place | {"part": part}),
            ("response.output_item.done", {"output_index": output_index, "item": item}),
        ]
        return b"".join(self._emit(self._next(), kind, **members) for kind, members in events)

    def _close_message(self, item: dict[str, Any]) -> bytes:
        (part,) = item["content"]
        frames = b"" if self._content_size else self._open_last_message()
        place, done = self._place(), {"text": part["text"], "logprobs": part["logprobs"]}
        if rest := part["text"][self._content_size :]:
            frames += self._emit(
                self._next(), "response.output_text.delta", **place, delta=rest, logprobs=[]
            )
        frames += self._emit(self._next(), "response.output_text.done", **place, **done)
        frames += self._emit(self._next(), "response.content_part.done", **place, part=part)
        return frames + self._emit(
            self._next(), "response.output_item.done", output_index=place["output_index"], item=item
        )

    def _open_last_message(self) -> bytes:
        if not self._reasoning:
            return self._open_message(self._base + _ITEM_ADDED)
        self._tail += 2
        return self._open_message(self._tail - 1)

    def _call(self, place: int, item: dict[str, Any]) -> bytes:
        name, member = _CALL_EVENTS[item["type"]]
        text = item[member]
        opened = item | {member: "", "status": "in_progress"}
        at = {"output_index": place, "item_id": item["id"]}
        done = {member: text} | ({"name": item["name"]} if member == "arguments" else {})
        return (
            self._emit(self._next(), "response.output_item.added", output_index=place, item=opened)
            + self._emit(self._next(), f"{name}.delta", **at, delta=text)
            + self._emit(self._next(), f"{name}.done", **at, **done)
            + self._emit(self._next(), "response.output_item.done", output_index=place, item=item)
        )

    def _place(self) -> dict[str, Any]:
        index = 1 if self._reasoning else 0
        return {"item_id": self._item_id, "output_index": index, "content_index": 0}

    def _reasoning_place(self) -> dict[str, Any]:
        return {"item_id": f"rs_{self._result_id}", "output_index": 0, "content_index": 0}

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
