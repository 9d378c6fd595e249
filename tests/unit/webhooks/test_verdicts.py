"""Verdicts after a call, the meaning of responses, and the bounds of teams and receivers."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from uuid import UUID

import httpx
import pytest

from app.webhooks.delivery import busy, verdict_after
from app.webhooks.outbox import Due
from app.webhooks.sender import CallOutcome, to_outcome

SCHEDULE = (100.0, 200.0)
DAY = 24 * 3600.0
REFUSED = CallOutcome("answered 500", 500)


def due(attempts: int = 1) -> Due:
    """A delivery at one of its calls."""
    return Due(UUID(int=1), "team", "http://a/", "a", attempts, datetime.now(UTC))


def test_an_accepted_message_is_delivered() -> None:
    verdict = verdict_after(due(9), CallOutcome(None, 204), SCHEDULE, "{}")
    assert (verdict.state, verdict.pause, verdict.entry) == ("delivered", 0, "{}")


@pytest.mark.parametrize(("attempts", "pause"), [(1, 100), (2, 200)])
def test_a_refused_message_waits_as_the_schedule_says(attempts: int, pause: float) -> None:
    pauses = set()
    for _ in range(50):
        verdict = verdict_after(due(attempts), REFUSED, SCHEDULE, "{}")
        assert verdict.state == "pending"
        pauses.add(verdict.pause)
    assert pause <= min(pauses)
    assert max(pauses) <= 1.1 * pause
    assert len(pauses) > 1  # jitter


def test_a_refusal_after_the_schedule_is_the_end() -> None:
    verdict = verdict_after(due(3), REFUSED, SCHEDULE, "{}")
    assert (verdict.state, verdict.pause) == ("failed", 0)


def test_a_final_refusal_is_the_end_at_the_first_call() -> None:
    verdict = verdict_after(due(1), CallOutcome("gone", 410, is_final=True), SCHEDULE, "{}")
    assert (verdict.state, verdict.pause) == ("failed", 0)


@pytest.mark.parametrize(("asked", "pause"), [(50, 100), (150, 150), (1e9, DAY)])
def test_a_receiver_may_ask_for_a_longer_pause_up_to_a_day(asked: float, pause: float) -> None:
    outcome = CallOutcome("busy", 503, retry_after=asked)
    verdict = verdict_after(due(1), outcome, SCHEDULE, "{}")
    assert pause <= verdict.pause <= 1.1 * pause


def test_a_team_has_as_many_calls_as_it_leaves_places() -> None:
    calls = [("many", f"h{n}") for n in range(5)] + [("few", f"h{n}") for n in range(4)]
    assert busy(calls, 6) == ([], [])
    assert busy(calls, 5) == (["many"], [])
    assert busy(calls, 4) == (["many", "few"], [])


def test_a_receiver_of_a_team_has_eight_calls() -> None:
    assert busy([("team", "host")] * 7, 57) == ([], [])
    assert busy([("team", "host")] * 8, 56) == ([], [("team", "host")])
    two_teams = [("one", "host")] * 4 + [("two", "host")] * 4
    assert busy(two_teams, 56) == ([], [])


# --- responses ------------------------------------------------------------------------------------


class Body(httpx.AsyncByteStream):
    """A body that arrives in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


async def outcome_of(status: int, *pieces: bytes, retry_after: str | None = None) -> CallOutcome:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return await to_outcome(httpx.Response(status, headers=headers, stream=Body(*pieces)))


@pytest.mark.parametrize("status", [200, 201, 204, 299])
async def test_each_success_accepts_the_message(status: int) -> None:
    assert await outcome_of(status, b"thanks") == CallOutcome(None, status)


async def test_a_redirect_is_a_refusal_that_may_pass() -> None:
    outcome = await to_outcome(httpx.Response(308, headers={"location": "http://b/"}))
    assert outcome == CallOutcome("answered 308: redirects are not followed", 308)


async def test_gone_is_the_only_final_status() -> None:
    assert (await outcome_of(410)).is_final
    for status in (400, 401, 404, 409, 411, 429, 500, 503):
        outcome = await outcome_of(status)
        assert outcome == CallOutcome(f"answered {status}", status)


async def test_the_excerpt_is_one_printable_line_of_the_first_piece() -> None:
    outcome = await outcome_of(500, b" oh\n \x00no\x1b[0m ", b"more")
    assert outcome == CallOutcome("answered 500: oh no[0m", 500)
    outcome = await outcome_of(400, b"x" * 300)
    assert outcome == CallOutcome(f"answered 400: {'x' * 256}", 400)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0), ("7", 7), ("1234567890", 123_456_789), ("-5", 0), ("+5", 0), ("5 s", 0), ("", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
    ],
)  # fmt: skip
async def test_a_busy_receiver_names_seconds(text: str, seconds: float) -> None:
    for status in (429, 503):
        assert (await outcome_of(status, retry_after=text)).retry_after == seconds
    for status in (400, 500, 502):
        assert (await outcome_of(status, retry_after=text)).retry_after == 0


async def test_a_busy_receiver_names_a_date() -> None:
    seconds = (await outcome_of(503, retry_after="Fri, 31 Dec 2999 23:59:59 GMT")).retry_after
    left = (datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC) - datetime.now(UTC)).total_seconds()
    assert left <= seconds < left + 3600
