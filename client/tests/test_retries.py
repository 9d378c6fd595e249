"""Repetition of requests: pauses, Retry-After, and requests that may not be repeated."""

import httpx
import pytest

from llm_api_client.errors import APIStatusError, ConnectionFailedError
from llm_api_client.retries import Patience, with_retries
from llm_api_client.steps import (
    Again,
    Call,
    Emit,
    Exchange,
    Feed,
    Lost,
    Open,
    Outcome,
    Pause,
    Reply,
    Request,
    exchange,
)

GET = Request("GET", "/x")
POST = Request("POST", "/x", is_repeatable=False)
OK = Reply(200, {}, b"{}")
BUSY = Reply(503, {"retry-after": "7"}, b'{"code": "memory_busy", "detail": "d"}')
BROKEN = Lost(httpx.ReadError("reset"))
REFUSED = Lost(httpx.ConnectError("refused"), may_have_arrived=False)


def play(operation: Call[Reply], *outcomes: Outcome, patience: float = 60) -> list[float]:
    """Run an operation with these outcomes of its exchanges; the pauses between them."""
    steps = with_retries(operation, patience)
    left = list(outcomes)
    pauses: list[float] = []
    outcome: Outcome = None
    while True:
        try:
            step = steps.send(outcome)
        except StopIteration:
            assert not left
            return pauses
        if isinstance(step, Pause):
            pauses.append(step.seconds)
            outcome = None
        else:
            outcome = left.pop(0)


@pytest.mark.parametrize(
    "outcome", [BROKEN, REFUSED, BUSY, Reply(429, {}), Reply(502, {}, b"<html>")]
)
def test_a_request_is_repeated(outcome: Outcome) -> None:
    assert len(play(exchange(GET), outcome, outcome, OK)) == 2


def test_retry_after_is_honoured() -> None:
    (pause,) = play(exchange(GET), BUSY, OK)
    assert 7 <= pause <= 7.25


def test_pauses_grow_and_are_random() -> None:
    high = Patience(1e9, chance=lambda: 1.0)
    assert [high.next_pause() for _ in range(7)] == [0.25, 0.5, 1, 2, 4, 8, 8]
    low = Patience(1e9, chance=lambda: 0.0)
    assert [low.next_pause() for _ in range(3)] == [0.125, 0.25, 0.5]


def test_patience_ends() -> None:
    now = [0.0]
    patience = Patience(10, clock=lambda: now[0], chance=lambda: 0.0)
    now[0] = 9.8
    assert patience.next_pause() is not None
    now[0] = 9.9
    assert patience.next_pause() is None
    patience.renew()
    assert patience.next_pause() == 0.125


def test_no_patience_is_one_try() -> None:
    with pytest.raises(ConnectionFailedError, match="reset"):
        play(exchange(GET), BROKEN, patience=0)
    with pytest.raises(APIStatusError, match="memory_busy"):
        play(exchange(GET), BUSY, patience=5)  # Retry-After is later


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 500])
def test_a_refusal_is_final(status: int) -> None:
    with pytest.raises(APIStatusError):
        play(exchange(GET), Reply(status, {}, b"no"))


def test_work_is_not_done_twice() -> None:
    with pytest.raises(ConnectionFailedError):
        play(exchange(POST), BROKEN)
    lost = Reply(503, {}, b'{"code": "database_unavailable", "detail": "d"}')
    with pytest.raises(APIStatusError):
        play(exchange(POST), lost)
    with pytest.raises(APIStatusError):
        play(exchange(POST), Reply(504, {}, b""))
    assert len(play(exchange(POST), REFUSED, BUSY, OK)) == 2  # these cannot have been stored


def feed_of(rounds: int) -> Feed[int]:
    for number in range(rounds):
        outcome = yield Open(GET)
        yield Emit(number)
        assert isinstance(outcome, Lost)
        yield Again(outcome)


def test_an_item_renews_the_patience_of_a_feed() -> None:
    steps = with_retries(feed_of(50), 0.3)
    outcome: Outcome = None
    pauses = 0
    for _ in range(1000):
        try:
            step = steps.send(outcome)
        except StopIteration:
            break
        outcome = BROKEN if isinstance(step, (Open, Exchange)) else None
        pauses += isinstance(step, Pause)
    assert pauses == 50
