"""Responses of a stream, and texts that continue an earlier attempt's."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from app.core import tracing
from app.core.errors import FailureCode
from app.inference.triton_errors import RefusedError, StreamLostError
from app.inference.triton_messages import EarlierText
from app.queue.continuation import Resume
from app.queue.finish import AttemptOutcome
from app.worker.backends.triton_backend import Generation, rest_of
from tests.unit.worker.scripted_servers import Bench, OnDelta, delta
from tests.unit.worker.test_attempt import claim_of
from tests.unit.worker.test_triton_backend import ended
from tests.virtual_time import run_in_virtual_time

COMPLETED, FAILED = AttemptOutcome.COMPLETED, AttemptOutcome.FAILED
RETURNED = AttemptOutcome.RETURNED
ID = b"\1\0\0\0"


def test_the_responses_of_a_stream_add_up() -> None:
    async def work() -> None:
        bench = Bench(1)

        async def answer(on_delta: OnDelta) -> None:
            await asyncio.sleep(1)
            on_delta(delta("", None, completion_tokens=0, token_ids=None))
            await asyncio.sleep(1)
            on_delta(delta("a", None, token_ids=ID, prompt_tokens=7))
            await asyncio.sleep(1)
            on_delta(delta("b", None, completion_tokens=2, token_ids=2 * ID, prompt_tokens=0))
            assert not attempt.is_over
            on_delta(delta("c", "length", token_ids=ID, model_version=5, prompt_tokens=0))
            assert attempt.is_over

        bench.clients[0].answer = answer
        attempt = bench.generation(claim_of(resumable=True))
        end = await attempt.run()
        assert end is not None
        assert (end.output, end.finish_reason, end.model_version) == ("abc", "length", 5)
        assert (end.prompt_tokens, end.completion_tokens) == (7, 4)
        assert end.first_token_seconds == 2.0
        assert attempt.heard_at == asyncio.get_running_loop().time()
        assert bench.servers[0].heard_at == {"m": attempt.heard_at}
        chunk = attempt.take_chunk(is_last=True)
        assert chunk is not None
        assert chunk.token_ids == 4 * ID

    run_in_virtual_time(work())


@pytest.mark.parametrize(
    ("reason", "parameters", "outcome", "code"),
    [
        ("abort", {"structured_outputs": {}}, AttemptOutcome.LOST, FailureCode.TRITON_LOST),
        ("grammar_too_slow", {}, AttemptOutcome.FAILED, FailureCode.GRAMMAR_TOO_SLOW),
        ("error", {}, FAILED, FailureCode.MODEL_ERROR),
        ("error", {"structured_outputs": {}}, FAILED, FailureCode.INVALID_REQUEST),
    ],
)
def test_a_generation_that_the_engine_gave_up_is_not_complete(
    reason: str, parameters: dict[str, Any], outcome: AttemptOutcome, code: FailureCode
) -> None:
    async def work() -> None:
        bench = Bench(1)

        async def answer(on_delta: OnDelta) -> None:
            on_delta(delta("half a", None, token_ids=ID))
            on_delta(delta(" sen", reason, token_ids=ID))

        bench.clients[0].answer = answer
        claim = claim_of(resumable=True)
        attempt = bench.generation(replace(claim, parameters=claim.parameters | parameters))
        end = await attempt.run()
        assert end is not None
        assert end.failure is not None
        assert (end.outcome, end.failure.code) == (outcome, code)
        assert (end.output, end.finish_reason, end.completion_tokens) == ("half a sen", None, 2)
        assert end.keeps_text == (outcome is AttemptOutcome.LOST)

    run_in_virtual_time(work())


@pytest.mark.parametrize(
    ("ids", "tokens", "keeps"), [(ID, 1, True), (None, 1, False), (ID, 2, False), (None, 0, True)]
)
async def test_a_text_is_continued_by_ids_only_if_each_token_has_one(
    ids: bytes | None, tokens: int, keeps: bool
) -> None:
    bench = Bench(1)

    async def answer(on_delta: OnDelta) -> None:
        on_delta(delta(finish_reason=None, completion_tokens=tokens, token_ids=ids))
        raise StreamLostError("cut")

    bench.clients[0].answer = answer
    end = await bench.generation(claim_of(resumable=True)).run()
    assert end is not None
    assert end.keeps_text is keeps
    await bench.backend.close()


async def test_unreadable_log_probabilities_fail_the_result() -> None:
    bench = Bench(1)

    async def answer(on_delta: OnDelta) -> None:
        on_delta(delta(logprobs='[{"7": {"logprob": -1}}]', finish_reason=None))
        on_delta(delta(logprobs="nonsense"))

    bench.clients[0].answer = answer
    attempt = bench.generation()
    assert await ended(attempt) == (FAILED, FailureCode.MODEL_ERROR)
    assert attempt.tokens.since(0) == [{"7": {"logprob": -1}}]


class Calls:
    """The traces of calls: each call is the child of its result's trace."""

    @contextlib.contextmanager
    def calling(
        self,
        name: str,
        parent: str,
        attributes: tracing.Attributes,
        answer: Callable[[], tracing.Attributes],
    ) -> Iterator[str]:
        assert (name, attributes["gen_ai.request.model"]) == ("text_completion m", "m")
        yield f"child of {parent}"
        assert answer()["gen_ai.response.finish_reasons"] == ["stop"]


async def test_a_call_has_the_trace_of_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results without a trace, and workers without traces, send none."""
    bench = Bench(1)
    traced = replace(claim_of(), trace="00-1-2-01")
    await bench.generation(traced).run()
    monkeypatch.setattr(tracing, "active", cast(tracing.Tracing, Calls()))
    for claim in (traced, claim_of()):
        await bench.generation(claim).run()
    found = [request.traceparent for request in bench.clients[0].requests]
    assert found == [None, "child of 00-1-2-01", None]


# --- continuation -----------------------------------------------------------------------------------

PARAMETERS = {"max_tokens": 10, "temperature": 0}


def continuing(bench: Bench, resume: Resume, **parameters: Any) -> Generation:
    claim = claim_of(resumable=True, resume=resume)
    return bench.generation(replace(claim, parameters=PARAMETERS | parameters))


async def test_an_earlier_text_is_sent_with_its_ids() -> None:
    bench = Bench(1)
    attempt = continuing(bench, Resume("once", ID, prompt_tokens=3, completion_tokens=1))
    assert await ended(attempt) == (COMPLETED, None)
    (request,) = bench.clients[0].requests
    assert (request.prompt, request.parameters, request.wants_ids) == ("p", PARAMETERS, True)
    assert request.earlier == EarlierText("once", ID)
    assert str(attempt.text) == "oncex"
    assert (attempt.prompt_tokens, attempt.completion_tokens) == (3, 2)


async def test_a_new_text_asks_for_ids_if_it_may_be_continued() -> None:
    for resumable in (True, False):
        bench = Bench(1)
        await bench.generation(claim_of(resumable=resumable)).run()
        (request,) = bench.clients[0].requests
        assert (request.wants_ids, request.earlier) == (resumable, None)


NO_IDS = Resume("once", None, prompt_tokens=None, completion_tokens=4)


async def test_a_text_without_ids_is_continued_as_a_prompt_if_that_is_allowed() -> None:
    bench = Bench(1, continues_by_text=True)
    attempt = continuing(bench, NO_IDS, min_tokens=6)
    assert await ended(attempt) == (COMPLETED, None)
    (request,) = bench.clients[0].requests
    assert (request.prompt, request.earlier, request.wants_ids) == ("ponce", None, False)
    assert request.parameters == {"max_tokens": 6, "min_tokens": 2, "temperature": 0}
    assert attempt.prompt_tokens == 1  # the first count is better than none


@pytest.mark.parametrize(
    ("by_text", "resume"),
    [
        (False, NO_IDS),
        (True, Resume("once", None, completion_tokens=0)),
        (True, Resume(fault="a gap")),
    ],
)
async def test_a_text_that_cannot_be_continued_starts_over(by_text: bool, resume: Resume) -> None:
    bench = Bench(1, continues_by_text=by_text)
    attempt = continuing(bench, resume)
    end = await attempt.run()
    assert end is not None
    assert end.failure is not None
    assert (end.outcome, end.failure.code) == (RETURNED, FailureCode.NOT_CONTINUED)
    assert end.failure.retryable
    assert attempt.starts_over
    assert bench.clients[0].requests == []


@pytest.mark.parametrize(("done", "reason", "requests"), [(9, "stop", 1), (10, "length", 0)])
async def test_a_text_that_has_all_its_tokens_needs_no_model(
    done: int, reason: str, requests: int
) -> None:
    bench = Bench(1, continues_by_text=True)
    attempt = continuing(bench, replace(NO_IDS, completion_tokens=done))
    assert await ended(attempt) == (COMPLETED, None)
    assert (attempt.finish_reason, len(bench.clients[0].requests)) == (reason, requests)


@pytest.mark.parametrize(
    ("message", "is_continued", "starts_over"),
    [
        ("resume_token_ids: too long", True, True),
        ("too long: resume_token_ids", True, False),
        ("resume_token_ids: too long", False, False),
    ],
)
async def test_a_refused_continuation_starts_over_and_a_refused_request_fails(
    message: str, is_continued: bool, starts_over: bool
) -> None:
    bench = Bench(1)
    bench.clients[0].raise_always(RefusedError(message))
    resume = Resume("once", ID, completion_tokens=1)
    attempt = continuing(bench, resume) if is_continued else bench.generation()
    code = FailureCode.NOT_CONTINUED if starts_over else FailureCode.INVALID_REQUEST
    assert await ended(attempt) == (RETURNED if starts_over else FAILED, code)
    assert attempt.starts_over is starts_over


@pytest.mark.parametrize(
    ("parameters", "rest"),
    [
        ({"max_tokens": 9, "top_k": 1}, {"max_tokens": 5, "top_k": 1}),
        ({"max_tokens": 9, "min_tokens": 4}, {"max_tokens": 5, "min_tokens": 0}),
        ({"max_tokens": 9, "min_tokens": 3}, {"max_tokens": 5, "min_tokens": 0}),
        ({"max_tokens": 9, "min_tokens": 0}, {"max_tokens": 5, "min_tokens": 0}),
    ],
)
def test_the_rest_of_a_text_has_fewer_tokens(
    parameters: dict[str, Any], rest: dict[str, Any]
) -> None:
    assert rest_of(parameters, 4) == rest
