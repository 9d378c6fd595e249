"""Events on the wire, as https://html.spec.whatwg.org/multipage/server-sent-events.html has them."""

import pytest

from app.api.sse import encode_event
from app.core.errors import InvalidRequestError
from app.results.streams.result_reader import Position


def test_an_event_is_four_lines() -> None:
    assert encode_event("delta", "1:5", b"{}") == b"event: delta\nid: 1:5\ndata: {}\n\n"
    assert encode_event("x", "0:0", b"1", retry=True).startswith(b"retry: 1000\nevent: x\n")


def test_positions_read_back() -> None:
    position = Position(3, 120)
    assert Position.parse(str(position), "after") == position


@pytest.mark.parametrize("text", ["", ":", "1:", ":1", "1:1 ", "+1:1", "1:1:1", "a:b", "1" * 20])
def test_garbage_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Position.parse(text, "Last-Event-ID")
    assert refused.value.errors[0].field == "Last-Event-ID"
