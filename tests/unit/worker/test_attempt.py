"""One attempt alone: its stop, its time, the parts and the end of its text."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from app.core.errors import CANCELLED, DEADLINE_EXCEEDED, Failure, FailureCode
from app.core.ids import new_id
from app.queue.claim import Claim
from app.queue.continuation import Resume
from app.queue.finish import AttemptOutcome
from app.worker.attempt import Attempt, Flushes, OnText, StopReason
from tests.virtual_time import run_in_virtual_time

LOST = Failure(FailureCode.TRITON_LOST, "lost", True)
Outcome = tuple[AttemptOutcome, Failure | None]
COMPLETED: Outcome = (AttemptOutcome.COMPLETED, None)


def claim_of(
    *, seconds: float = 60.0, resumable: bool = False, resume: Resume | None = None
) -> Claim:
    return Claim(
        new_id(), 3, "m", "p", {}, seconds, is_suspect=False, resumable=resumable, resume=resume
    )


class Scripted(Attempt):
    """Ends with a given outcome, after some seconds."""

    def __init__(self, claim: Claim, on_text: OnText = lambda _: None) -> None:
        super().__init__(claim, on_text)
        self.seconds = 0.0
        self.outcome = COMPLETED
        self.has_worked = False

    async def _work(self) -> Outcome:
        self.has_worked = True
        await asyncio.sleep(self.seconds)  # in virtual time
        return self.outcome

    def _lost(self) -> Failure:
        return LOST

    def say(self, text: str, tokens: int = 1, ids: bytes = b"") -> None:
        self.completion_tokens += tokens
        self._ids += ids
        self._emit(text)


async def ended(claim: Claim, act: Callable[[Scripted], object]) -> tuple[AttemptOutcome, object]:
    attempt = Scripted(claim)
    act(attempt)
    end = await attempt.run()
    assert end is not None
    return end.outcome, end.failure


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (StopReason.CANCELLED, (AttemptOutcome.FAILED, CANCELLED)),
        (StopReason.MODEL_DIED, (AttemptOutcome.LOST, LOST)),
        (StopReason.SHUTDOWN, (AttemptOutcome.RETURNED, None)),
        (StopReason.NOT_OURS, None),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_stopped_attempt_ends_by_its_first_reason(
    reason: StopReason, outcome: Outcome | None, before: bool
) -> None:
    """Before its work, which then never begins, or in the middle of it."""

    async def work() -> None:
        attempt = Scripted(claim_of())
        attempt.seconds = 10
        if before:
            attempt.stop(reason)
        running = asyncio.create_task(attempt.run())
        await asyncio.sleep(1)
        if not before:
            assert not attempt.is_over
            attempt.stop(reason)
        for later in StopReason:
            attempt.stop(later)
        end = await running
        found = None if end is None else (end.outcome, end.failure)
        assert found == outcome
        assert attempt.is_over
        assert attempt.has_worked is not before
        attempt.stop(reason)  # without effect on the task, which does other things now

    run_in_virtual_time(work())


def test_a_cancelled_task_is_no_stopped_attempt() -> None:
    """The worker gives the attempt up: nothing may be written."""

    async def work() -> None:
        attempt = Scripted(claim_of())
        attempt.seconds = 10
        running = asyncio.create_task(attempt.run())
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert attempt.is_over

    run_in_virtual_time(work())


def test_an_attempt_ends_at_its_deadline() -> None:
    async def work() -> list[object]:
        outcomes: list[object] = []
        for seconds in (-5.0, 0.0, 2.0, 4.0):
            began = asyncio.get_running_loop().time()
            end = await ended(claim_of(seconds=seconds), lambda one: setattr(one, "seconds", 3.0))
            outcomes.append((*end, asyncio.get_running_loop().time() - began))
        return outcomes

    late = (AttemptOutcome.FAILED, DEADLINE_EXCEEDED)
    assert run_in_virtual_time(work()) == [(*late, 0), (*late, 0), (*late, 2), (*COMPLETED, 3)]


async def test_the_text_is_taken_in_parts_and_its_rest_once_it_ended() -> None:
    grown: list[Attempt] = []
    attempt = Scripted(claim_of(), grown.append)
    assert attempt.take_chunk() is None
    attempt.prompt_tokens = 7
    attempt.say("ab", ids=b"\1\0\0\0")
    assert grown == [attempt]
    chunk = attempt.take_chunk()
    assert chunk is not None
    assert (chunk.result_id, chunk.attempt) == (attempt.claim.id, 3)
    assert (chunk.offset, chunk.text, chunk.token_ids) == (0, "ab", b"\1\0\0\0")
    assert (chunk.prompt_tokens, chunk.completion_tokens) == (7, 1)
    assert attempt.take_chunk() is None
    attempt.say("c")
    chunk = attempt.take_chunk()
    assert chunk is not None
    assert (chunk.offset, chunk.text, chunk.token_ids) == (2, "c", None)
    assert attempt.take_chunk(is_last=True) is None
    attempt.say("d", ids=b"\2\0\0\0")
    attempt.is_over = True
    assert attempt.take_chunk() is None
    chunk = attempt.take_chunk(is_last=True)
    assert chunk is not None
    assert (chunk.offset, chunk.text, chunk.token_ids) == (3, "d", b"\2\0\0\0")


def test_a_new_attempt_has_neither_begun_nor_ended() -> None:
    async def work() -> None:
        attempt = Scripted(claim_of())
        flags = (attempt.is_over, attempt.model_is_dead, attempt.has_answered, attempt.starts_over)
        assert flags == (False,) * 4
        assert not attempt.keeps_text_without_ids
        assert (attempt.completion_tokens, attempt.generated_tokens) == (0, 0)

    run_in_virtual_time(work())


async def test_a_continued_attempt_begins_with_the_earlier_text() -> None:
    resume = Resume("before", b"\1\0\0\0" * 5, prompt_tokens=7, completion_tokens=5)
    attempt = Scripted(claim_of(resume=resume))
    assert (str(attempt.text), attempt.prompt_tokens) == ("before", 7)
    assert (attempt.completion_tokens, attempt.generated_tokens) == (5, 0)
    assert attempt.take_chunk(is_last=True) is None
    attempt.say(" and", tokens=2)
    assert (attempt.completion_tokens, attempt.generated_tokens) == (7, 2)
    chunk = attempt.take_chunk()
    assert chunk is not None
    assert (chunk.offset, chunk.text, chunk.completion_tokens) == (6, " and", 7)


@pytest.mark.parametrize(
    ("outcome", "seconds"),
    [
        ((AttemptOutcome.RETURNED, LOST), 1.0),  # no server took it: time for one to come up
        ((AttemptOutcome.RETURNED, None), 0.0),  # handed back: another worker may take it at once
        ((AttemptOutcome.LOST, LOST), 0.5),
        (COMPLETED, 0.0),
    ],
)
async def test_a_result_without_a_backend_waits_before_its_next_attempt(
    outcome: Outcome, seconds: float
) -> None:
    attempt = Scripted(claim_of())
    attempt.outcome = outcome
    end = await attempt.run()
    assert end is not None
    assert end.retry_after_seconds == seconds
    attempt = Scripted(claim_of())
    attempt.outcome, attempt.starts_over = outcome, True
    end = await attempt.run()
    assert end is not None
    assert end.retry_after_seconds == 0.0


IDS = Resume("before", b"\1\0\0\0", completion_tokens=1)
NO_IDS = Resume("before", None, completion_tokens=1)


@pytest.mark.parametrize(
    ("resume", "says", "by_text", "starts_over", "keeps"),
    [
        (None, "x", False, False, True),
        (None, "", False, False, False),
        (IDS, "", False, False, True),
        (IDS, "x", False, True, False),
        (NO_IDS, "x", False, False, False),
        (NO_IDS, "x", True, False, True),
        (NO_IDS, "x", True, True, False),
    ],
)
@pytest.mark.parametrize("outcome", [AttemptOutcome.LOST, AttemptOutcome.RETURNED])
async def test_the_text_of_a_lost_attempt_is_kept_if_the_next_can_continue_it(
    resume: Resume | None,
    says: str,
    by_text: bool,
    starts_over: bool,
    keeps: bool,
    outcome: AttemptOutcome,
) -> None:
    """By the ids of its tokens, or by its text where the backend may do that."""
    for resumable in (True, False):
        attempt = Scripted(claim_of(resumable=resumable, resume=resume))
        attempt.outcome = (outcome, LOST)
        attempt.keeps_text_without_ids, attempt.starts_over = by_text, starts_over
        if says:
            attempt.say(says)
        end = await attempt.run()
        assert end is not None
        assert end.keeps_text is (keeps and resumable)


async def test_the_text_of_an_ended_result_is_not_kept_as_chunks() -> None:
    attempt = Scripted(claim_of(resumable=True))
    attempt.say("x")
    end = await attempt.run()
    assert end is not None
    assert (end.output, end.keeps_text) == ("x", False)


@pytest.mark.parametrize(
    ("number", "is_taken", "has_chunks"),
    [(1, False, False), (1, True, True), (2, False, True)],
)
async def test_an_end_reports_whether_text_may_be_stored(
    number: int, is_taken: bool, has_chunks: bool
) -> None:
    """The text is of this attempt, or of an earlier one."""
    attempt = Scripted(replace(claim_of(), attempt=number, has_webhook=is_taken))
    attempt.say("x")
    if is_taken:
        assert attempt.take_chunk() is not None
    end = await attempt.run()
    assert end is not None
    assert (end.has_chunks, end.has_webhook) == (has_chunks, is_taken)


@pytest.mark.parametrize("has_answered", [True, False])
async def test_an_end_reports_what_it_continued(has_answered: bool) -> None:
    """Only an answer proves that the model did."""
    found = []
    for resume, starts_over in ((IDS, False), (IDS, True), (None, False)):
        attempt = Scripted(claim_of(resume=resume))
        attempt.has_answered, attempt.starts_over = has_answered, starts_over
        end = await attempt.run()
        assert end is not None
        found.append((end.continued_from, end.continued))
    assert found == [(6, has_answered), (None, False), (None, False)]


def test_the_writes_of_a_text_are_summed_up() -> None:
    flushes = Flushes(10.0, 11.0)
    for began, end in ((10.0, 11.0), (20.0, 23.5), (30.0, 32.0)):
        flushes.add(began, end)
    assert (flushes.first, flushes.last, flushes.count, flushes.slowest) == (10.0, 32.0, 3, 3.5)
