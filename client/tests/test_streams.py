"""Streams: events in any portions, restarts, resumption, the end."""

import httpx
import pytest

from llm_api_client.errors import NotFoundError
from llm_api_client.operations.streams import StreamEvent, Transcript, stream_events
from llm_api_client.retries import with_retries
from llm_api_client.sse import EventParser
from llm_api_client.steps import Again, Emit, Exchange, Lost, Open, Outcome, Read, Reply

RESULT = b'{"id":"r","state":"completed","model_name":"m","result":"a \xf0\x9f\x99\x82!"}'
BODY = (
    b'retry: 1000\nevent: attempt\nid: 1:0\ndata: {"attempt":1,"age":0.1}\n\n'
    b': keep-alive\nevent: delta\nid: 1:3\ndata: {"text":"a \xf0\x9f\x99\x82","offset":0}\n\n'
    b'event: delta\nid: 1:4\ndata: {"text":"!","offset":3}\n\n'
    b"event: completed\nid: 1:5\ndata: " + RESULT + b"\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_in_any_portions(size: int, end: bytes) -> None:
    body = BODY.replace(b"\n", end)
    parser = EventParser()
    events = [event for i in range(0, len(body), size) for event in parser.feed(body[i : i + size])]
    assert [event.name for event in events] == ["attempt", "delta", "delta", "completed"]
    assert [event.id for event in events] == ["1:0", "1:3", "1:4", "1:5"]


def test_an_event_that_was_cut_does_not_count() -> None:
    assert list(EventParser().feed(BODY[: BODY.index(b": keep-alive") - 1])) == []


def read(transcript: Transcript, *outcomes: Outcome) -> tuple[list[StreamEvent], list[str]]:
    """The events, and the positions that connections were opened at."""
    steps, left = stream_events(transcript), list(outcomes)
    outcome: Outcome = None
    events: list[StreamEvent] = []
    positions: list[str] = []
    while True:
        try:
            step = steps.send(outcome)
        except StopIteration:
            assert not left
            return events, positions
        outcome = None
        if isinstance(step, Emit):
            events.append(step.item)
        elif isinstance(step, Open):
            positions.append(step.request.headers["Last-Event-ID"])
            outcome = left.pop(0)
        elif isinstance(step, (Read, Exchange)):
            outcome = left.pop(0)
        else:
            assert isinstance(step, Again)


def test_a_stream_resumes_behind_its_last_whole_event() -> None:
    transcript = Transcript("r")
    cut = BODY.index(b"!")
    rest = BODY[BODY.index(b"event: delta\nid: 1:4") :]
    events, positions = read(
        transcript,
        Lost(httpx.ConnectError("refused")),
        Reply(200, {}), BODY[:cut], Lost(httpx.ReadError("reset")),
        Reply(503, {}),
        Reply(200, {}), b"",
        Reply(200, {}), rest,
    )  # fmt: skip
    assert positions == ["0:0", "0:0", "1:3", "1:3", "1:3"]
    assert "".join(event.text for event in events) == transcript.text == "a 🙂!"
    assert transcript.result is not None
    assert transcript.result.text == transcript.text


def test_a_stream_whose_end_was_read_elsewhere() -> None:
    transcript = Transcript("r")
    events, _ = read(transcript, Reply(204, {}), Reply(200, {}, RESULT))
    assert [event.kind for event in events] == ["completed"]


def test_an_unknown_result_is_an_error() -> None:
    steps = with_retries(stream_events(Transcript("r")), 60)
    next(steps)
    with pytest.raises(NotFoundError):
        steps.send(Reply(404, {}, b'{"code": "not_found", "detail": "d"}'))


def test_a_lost_attempt_drops_text() -> None:
    transcript = Transcript("r")
    for event in (
        StreamEvent(kind="attempt", id="1:0", attempt=1),
        StreamEvent(kind="delta", id="1:5", text="abcde"),
        StreamEvent(kind="attempt", id="2:2", attempt=2, offset=2),
        StreamEvent(kind="delta", id="2:4", text="XY", offset=2),
    ):
        transcript.take(event)
    assert (transcript.text, transcript.restarts, transcript.attempt) == ("abXY", 1, 2)
    transcript.take(StreamEvent(kind="attempt", id="3:4", attempt=3, offset=4))
    assert (transcript.text, transcript.restarts) == ("abXY", 1)
