"""Streams: a result's text as it is generated, over any number of connections."""

from typing import Literal
from urllib.parse import quote

import msgspec

from llm_api_client.operations.results import get
from llm_api_client.schemas import Result
from llm_api_client.sse import EventParser, ServerSentEvent
from llm_api_client.steps import Again, Emit, Feed, Lost, Open, Read, Reply, Request

# The service sends a comment every 15 seconds: a longer silence is a dead connection.
_SILENCE_SECONDS = 60.0
_BEGINNING = "0:0"


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream.

    Attributes:
        kind: `attempt`: an attempt starts; `delta`: more text; `completed` or `failed`: the end.
        id: `attempt:offset`, at which a reader resumes behind this event.
        text: of a delta.
        offset: code points of the text that stay before this event's text; the rest is dropped.
        attempt: number of the attempt.
        result: at the end.
    """

    kind: Literal["attempt", "delta", "completed", "failed"]
    id: str
    text: str = ""
    offset: int = 0
    attempt: int = 0
    result: Result | None = None


class _Attempt(msgspec.Struct):
    attempt: int
    continued_from: int = 0


class _Delta(msgspec.Struct):
    text: str
    offset: int


class Transcript:
    """The text of a stream so far, joined by offsets, and the position to resume from."""

    def __init__(self, result_id: str) -> None:
        self.result_id = result_id
        self.position = _BEGINNING
        self.attempt = 0
        self.result: Result | None = None
        # Times that an attempt began with less text than the reader had.
        self.restarts = 0
        self._pieces: list[str] = []
        self._length = 0

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def is_over(self) -> bool:
        return self.result is not None

    def take(self, event: StreamEvent) -> None:
        """Add an event's text; code points behind its offset are dropped."""
        if event.kind in ("attempt", "delta"):
            if event.offset < self._length:
                self.restarts += event.kind == "attempt"
                self._pieces = [self.text[: event.offset]]
                self._length = event.offset
            self._pieces.append(event.text)
            self._length += len(event.text)
            self.attempt = event.attempt or self.attempt
        else:
            self.result = event.result
        self.position = event.id


def stream_events(transcript: Transcript) -> Feed[StreamEvent]:
    """The events behind the transcript's position, to the end of the result.

    Raises:
        ConnectionFailedError: no event arrived within the client's patience.
        NotFoundError: there is no such result.
    """
    path = f"/results/{quote(transcript.result_id, safe='')}/stream"
    while True:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": transcript.position}
        outcome = yield Open(Request("GET", path, headers=headers, timeout=_SILENCE_SECONDS))
        if isinstance(outcome, Reply) and outcome.status == 204:
            result = yield from get(transcript.result_id)
            yield from _emit(transcript, _end(result, transcript.position))
            return
        parser = EventParser()
        while isinstance(outcome, bytes) or (isinstance(outcome, Reply) and outcome.status == 200):
            outcome = yield Read()
            if outcome == b"":
                outcome = Lost(EOFError("the stream ended before the result"))
            if isinstance(outcome, bytes):
                for event in parser.feed(outcome):
                    yield from _emit(transcript, read_event(event))
                    if transcript.is_over:
                        return
        assert isinstance(outcome, (Reply, Lost))
        yield Again(outcome)


def _emit(transcript: Transcript, event: StreamEvent) -> Feed[StreamEvent]:
    transcript.take(event)
    yield Emit(event)


def _end(result: Result, position: str) -> StreamEvent:
    kind: Literal["completed", "failed"] = "failed" if result.state == "failed" else "completed"
    return StreamEvent(kind=kind, id=position, result=result)


def read_event(event: ServerSentEvent) -> StreamEvent:
    """The event of a stream that a server-sent event carries."""
    if event.name == "attempt":
        begun = msgspec.json.decode(event.data, type=_Attempt)
        return StreamEvent(
            kind="attempt", id=event.id, offset=begun.continued_from, attempt=begun.attempt
        )
    if event.name == "delta":
        delta = msgspec.json.decode(event.data, type=_Delta)
        return StreamEvent(kind="delta", id=event.id, text=delta.text, offset=delta.offset)
    return _end(msgspec.json.decode(event.data, type=Result), event.id)
