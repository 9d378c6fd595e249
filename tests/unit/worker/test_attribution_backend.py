"""Attribution with engines of the test: their places, their pauses, and the end of their work."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from app.core.errors import INTERNAL_ERROR, FailureCode
from app.core.ids import new_id
from app.infini_gram.process import (
    Attributed,
    AttributionFailedError,
    AttributionRefusedError,
    EngineDiedError,
    EngineProcess,
)
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.worker.attempt import Attempt
from app.worker.backends.attribution_backend import AttributionBackend
from tests.unit.worker.test_attempt import LOST, claim_of
from tests.virtual_time import run_in_virtual_time

QUEUE = "infini-gram/corpus"


class Engine:
    """A process that answers by `answer`, until it is killed."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self.is_alive = True
        self.error: Exception | None = None
        self.seconds = 0.0
        self.is_reaped = False

    async def attribute(self, _text: str, _parameters: object) -> Attributed:
        await asyncio.sleep(self.seconds)  # in virtual time
        if self.error is not None:
            raise self.error
        return Attributed('{"spans": []}', 9, 4)

    def kill(self) -> None:
        self.is_alive = False
        self.has_ended.set()

    async def wait(self) -> None:
        await self.has_ended.wait()

    async def end(self) -> None:
        self.kill()
        self.is_reaped = True


class Bench:
    """A backend whose engines start as the test demands; the times of their starts."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = AttributionBackend(Path("indexes.toml"), "corpus", count)
        self.engines: list[Engine] = []
        self.starts: list[float] = []
        self.failures: list[Exception] = []
        self.began = asyncio.get_running_loop().time()
        monkeypatch.setattr(EngineProcess, "start", self.start)

    async def start(self, declarations: Path, index: str) -> EngineProcess:
        assert (declarations, index) == (Path("indexes.toml").absolute(), "corpus")
        self.starts.append(asyncio.get_running_loop().time() - self.began)
        if self.failures:
            raise self.failures.pop(0)
        self.engines.append(Engine())
        return cast(EngineProcess, self.engines[-1])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.backend.open()
        task = asyncio.create_task(self.backend.run())
        await asyncio.sleep(0.01)  # in virtual time: the backend waits for work
        yield
        task.cancel()
        await asyncio.wait([task])

    def attempt(self) -> Attempt:
        return self.backend.attempt(claim_of(), lambda _: None)


def run(
    monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[Bench], Awaitable[None]]
) -> None:
    async def on_a_bench() -> None:
        await work(Bench(count, monkeypatch))

    run_in_virtual_time(on_a_bench())


def end_of(outcome: AttemptOutcome, code: FailureCode | None = None) -> AttemptEnd:
    failure = LOST if code is None else type(LOST)(code, "", False)
    return AttemptEnd(new_id(), 1, outcome, failure=None if code is None else failure)


async def ended(attempt: Attempt) -> AttemptEnd:
    end = await attempt.run()
    assert end is not None
    return end


def test_an_engine_runs_one_text_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bench: Bench) -> None:
        assert bench.backend.free([]) == {}  # no engine is up
        async with bench.running():
            assert len(bench.engines) == 2
            assert bench.backend.ready() == [QUEUE]
            attempts = [bench.attempt() for _ in range(3)]
            assert [bench.backend.free(attempts[:count]) for count in range(4)] == [
                {QUEUE: 2}, {QUEUE: 1}, {}, {},
            ]  # fmt: skip
            assert bench.backend.free([], {QUEUE}) == {}
            for engine in bench.engines:
                engine.seconds = 10
            began = asyncio.get_running_loop().time()
            ends = await asyncio.gather(*(ended(attempt) for attempt in attempts))
            assert asyncio.get_running_loop().time() - began == 20
            assert {end.outcome for end in ends} == {AttemptOutcome.COMPLETED}
        assert all(engine.is_reaped for engine in bench.engines)

    run(monkeypatch, 2, work)


def test_an_answer_is_one_text_that_no_chunk_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bench: Bench) -> None:
        async with bench.running():
            grown = list[bool]()
            attempt = bench.backend.attempt(claim_of(), lambda one: grown.append(one.is_over))
            end = await ended(attempt)
            assert (end.output, end.finish_reason) == ('{"spans": []}', "stop")
            assert (end.prompt_tokens, end.model_version) == (9, 4)
            assert grown == [True]

    run(monkeypatch, 1, work)


@pytest.mark.parametrize(
    ("error", "outcome", "code", "is_killed"),
    [
        (AttributionRefusedError("long"), AttemptOutcome.FAILED, FailureCode.INVALID_REQUEST, False),
        (AttributionFailedError("?"), AttemptOutcome.FAILED, FailureCode.INFINI_GRAM_ERROR, False),
        (
            AttributionFailedError("?", is_bug=True),
            AttemptOutcome.FAILED, INTERNAL_ERROR.code, False,
        ),
        (EngineDiedError("killed"), AttemptOutcome.LOST, FailureCode.ENGINE_LOST, True),
    ],
)  # fmt: skip
def test_an_error_of_an_engine_ends_the_text_and_only_a_death_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    outcome: AttemptOutcome,
    code: FailureCode,
    is_killed: bool,
) -> None:
    """An engine without an error of its own answers the next text."""

    async def work(bench: Bench) -> None:
        async with bench.running():
            (engine,) = bench.engines
            engine.error = error
            end = await ended(bench.attempt())
            assert end.failure is not None
            assert (end.outcome, end.failure.code) == (outcome, code)
            finals = FailureCode.INVALID_REQUEST, FailureCode.INFINI_GRAM_ERROR
            assert end.failure.retryable is (code not in finals)
            assert engine.is_alive is not is_killed
            engine.error = None
            assert (await ended(bench.attempt())).outcome is AttemptOutcome.COMPLETED
            assert len(bench.engines) == 1 + is_killed

    run(monkeypatch, 1, work)


def test_a_text_that_is_cut_short_ends_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would work on; a new one takes its place, and waiting texts pass dead ones by."""

    async def work(bench: Bench) -> None:
        async with bench.running():
            (first,) = bench.engines
            first.seconds = 1e6
            running = asyncio.create_task(bench.attempt().run())
            await asyncio.sleep(1)
            running.cancel()
            await asyncio.wait([running])
            assert not first.is_alive
            await asyncio.sleep(1)
            assert first.is_reaped
            second = bench.engines[1]
            second.kill()  # while it is idle
            assert bench.backend.ready() == []
            assert (await ended(bench.attempt())).outcome is AttemptOutcome.COMPLETED
            assert len(bench.engines) == 3
            assert bench.backend.ready() == [QUEUE]

    run(monkeypatch, 1, work)


def test_one_engine_of_several_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bench: Bench) -> None:
        async with bench.running():
            bench.engines[0].is_alive = False  # killed, and not ended yet
            assert bench.backend.ready() == [QUEUE]

    run(monkeypatch, 2, work)


def test_changes_of_the_engines_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the engine is counted, or no more."""

    async def work(bench: Bench) -> None:
        found = list[list[str]]()
        bench.backend.on_change(lambda: found.append(bench.backend.ready()))
        async with bench.running():
            assert found == [[QUEUE]]
            bench.failures = [OSError("no memory")]
            bench.engines[0].kill()
            await asyncio.sleep(0.5)
            assert found == [[QUEUE], []]
            await asyncio.sleep(1)
            assert found == [[QUEUE], [], [QUEUE]]

    run(monkeypatch, 1, work)


def test_an_engine_that_cannot_start_is_tried_again_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From one second to thirty; the next failure after a success begins with one again."""

    async def work(bench: Bench) -> None:
        errors = [OSError(), TimeoutError(), EngineDiedError("x"), AttributionFailedError("x")]
        async with bench.running():
            bench.failures = [*errors, *errors[:3]]
            bench.engines[0].kill()
            await asyncio.sleep(200)
            assert [round(at) for at in bench.starts] == [0, 0, 1, 3, 7, 15, 31, 61, 91]
            bench.failures = [OSError()]
            bench.engines[1].kill()
            await asyncio.sleep(10)
            assert [round(at) for at in bench.starts[-2:]] == [200, 201]

    run(monkeypatch, 1, work)


@pytest.mark.parametrize("outcome", [AttemptOutcome.LOST, AttemptOutcome.RETURNED])
def test_after_a_lost_engine_one_text_is_tried_until_another_is_answered(
    monkeypatch: pytest.MonkeyPatch, outcome: AttemptOutcome
) -> None:
    """A text that kills its engine must not be followed by others at once."""

    async def work(bench: Bench) -> None:
        backend = bench.backend
        async with bench.running():
            for end in (
                end_of(AttemptOutcome.COMPLETED),
                end_of(AttemptOutcome.FAILED, FailureCode.INVALID_REQUEST),
                end_of(AttemptOutcome.FAILED, FailureCode.MODEL_ERROR),
            ):
                backend.record_outcome((QUEUE,), end_of(outcome, FailureCode.ENGINE_LOST))
                assert backend.free([]) == {}
                await asyncio.sleep(0.9)
                assert backend.free([]) == {}
                await asyncio.sleep(0.2)
                assert backend.free([]) == {QUEUE: 1}
                assert backend.free([bench.attempt()]) == {}
                failed = end_of(AttemptOutcome.FAILED, FailureCode.INTERNAL_ERROR)
                backend.record_outcome((QUEUE,), failed)
                assert backend.free([]) == {QUEUE: 1}
                backend.record_outcome((QUEUE,), end)
                assert backend.free([]) == {QUEUE: 3}

    run(monkeypatch, 3, work)


def test_the_pause_after_a_lost_engine_is_over_after_one_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(bench: Bench) -> None:
        async with bench.running():
            end = end_of(AttemptOutcome.LOST, FailureCode.ENGINE_LOST)
            bench.backend.record_outcome((QUEUE,), end)
            await asyncio.sleep(1)
            assert bench.backend.free([]) == {QUEUE: 1}

    run(monkeypatch, 1, work)


def test_an_attempt_whose_process_was_ended_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bench: Bench) -> None:
        failure = bench.attempt()._lost()
        assert (failure.code, failure.retryable) == (FailureCode.ENGINE_LOST, True)

    run(monkeypatch, 1, work)
