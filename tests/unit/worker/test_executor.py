"""The attempts of one worker id, from claim to end."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

import orjson
import pytest

from app.core import metrics
from app.core.errors import CANCELLED, FailureCode
from app.inference.server_pool import DeadEngine
from app.queue.continuation import Resume
from app.queue.finish import AttemptOutcome
from app.queue.progress import Chunk
from tests.unit.worker.desk import COMPLETED, FAILED, Desk, sized
from tests.unit.worker.test_attempt import LOST, claim_of
from tests.virtual_time import run_in_virtual_time


def test_a_result_runs_until_its_end_is_committed() -> None:
    async def work() -> None:
        desk = Desk()
        desk.ends.seconds = 2.0
        claim = sized()
        attempt = desk.start(claim)
        before = metrics.ATTEMPTS.of("m", COMPLETED).value
        assert (desk.executor.running, desk.hub.running(claim.id)) == ({claim.id: attempt}, attempt)
        assert desk.executor.held_bytes == 100
        await asyncio.sleep(11)
        assert attempt.is_over
        assert desk.executor.running
        assert desk.ended == []
        await asyncio.sleep(2)
        assert (desk.executor.running, desk.hub.running(claim.id)) == ({}, None)
        assert (desk.executor.held_bytes, desk.executor.tasks) == (0, set())
        assert desk.ended == [claim]
        assert desk.outcomes == [(("a:1", "m"), COMPLETED)]
        assert metrics.ATTEMPTS.of("m", COMPLETED).value - before == 1

    run_in_virtual_time(work())


def test_the_end_of_an_attempt_leaves_its_successor_alone() -> None:
    """A result that was returned may run here again before its first attempt has ended."""

    async def work() -> None:
        desk, claim = Desk(), sized()
        desk.start(claim)
        await asyncio.sleep(5)
        second = desk.start(replace(claim, attempt=4))
        await asyncio.sleep(6)
        assert desk.executor.running == {claim.id: second}
        assert desk.hub.running(claim.id) is second
        await desk.until_all_ended()
        assert desk.executor.running == {}

    run_in_virtual_time(work())


def test_readers_and_the_writer_notice_text() -> None:
    async def work() -> None:
        desk, claim = Desk(), sized()
        attempt = desk.start(claim)
        with desk.hub.reading("red", claim.id) as signal:
            attempt.say("x")
            assert signal.is_set()
        assert desk.executor.writer._news == set()
        desk.watched.add(claim.id)
        desk.executor.writer.on_announced([claim.id])
        attempt.say("y")
        assert desk.executor.writer._news == {claim.id}
        await desk.executor.abandon()

    run_in_virtual_time(work())


def test_the_text_that_the_next_attempt_continues_is_stored_before_the_end() -> None:
    async def work() -> None:
        desk = Desk()
        for resumable in (True, False):
            claim = claim_of(resumable=resumable)
            attempt = desk.start(claim)
            attempt.outcome = (AttemptOutcome.LOST, LOST)
            attempt.say("text")
        desk.start(claim_of(resumable=True)).say("completed")
        desk.chunks.seconds = 1.0
        await asyncio.sleep(10.5)
        assert len(desk.ends.items) == 2  # not that of the first
        ends = await desk.until_all_ended()
        assert sorted(end.keeps_text for end in ends) == [False, False, True]
        (chunk,) = cast(list[Chunk], desk.chunks.items)
        assert chunk.text == "text"

    run_in_virtual_time(work())


def test_an_end_waits_for_the_text_that_is_being_written() -> None:
    async def work() -> None:
        desk = Desk()
        desk.start(sized())
        desk.executor.writer._is_idle.clear()
        await asyncio.sleep(20)
        assert desk.ends.items == []
        desk.executor.writer._is_idle.set()
        assert len(await desk.until_all_ended()) == 1

    run_in_virtual_time(work())


def test_an_end_without_stored_text_does_not_wait_for_that_of_others() -> None:
    async def work() -> None:
        desk = Desk()
        desk.start(replace(sized(), attempt=1))
        desk.executor.writer._is_idle.clear()
        assert len(await desk.until_all_ended()) == 1

    run_in_virtual_time(work())


def test_a_bug_ends_the_result() -> None:
    async def work() -> None:
        desk, claim = Desk(), sized()
        desk.start(claim).outcome = cast(tuple[AttemptOutcome, None], None)  # cannot be unpacked
        (end,) = await desk.until_all_ended()
        assert end.failure is not None
        assert (end.result_id, end.attempt) == (claim.id, claim.attempt)
        assert (end.outcome, end.failure.code) == (FAILED, FailureCode.INTERNAL_ERROR)

    run_in_virtual_time(work())


# --- results that start before they are stored ------------------------------------------------------


def test_an_early_result_is_hidden_until_it_is_stored() -> None:
    async def work() -> None:
        desk, mine, other, late = Desk(), sized(), sized(), sized()
        desk.executor.begin([mine, other])
        assert (desk.executor.running, desk.hub.running(mine.id)) == ({}, None)
        assert desk.executor.held_bytes == 200
        await asyncio.sleep(1)
        assert desk.attempts[mine.id].has_worked
        desk.executor.confirm([mine, late])
        assert desk.executor.running.keys() == {mine.id, late.id}
        assert desk.hub.running(mine.id) is desk.attempts[mine.id]
        assert desk.executor.held_bytes == 300
        await asyncio.sleep(0.5)
        assert desk.attempts[other.id].is_over
        assert desk.executor.held_bytes == 200
        ends = await desk.until_all_ended()
        assert {end.result_id for end in ends} == {mine.id, late.id}
        assert desk.ended == [mine, late]
        assert desk.executor.held_bytes == 0

    run_in_virtual_time(work())


def test_an_early_result_that_has_ended_is_committed_once_it_is_stored() -> None:
    async def work() -> None:
        desk, claims = Desk(), [sized(), sized()]
        desk.executor.begin(claims)
        await asyncio.sleep(20)
        assert desk.ends.items == []
        desk.executor.confirm(claims[:1])
        (end,) = await desk.until_all_ended()
        assert (end.result_id, end.outcome) == (claims[0].id, COMPLETED)
        desk.executor.confirm(claims[1:])  # its abort was final: this is a claim as any other
        assert desk.executor.running.keys() == {claims[1].id}
        await desk.until_all_ended()
        assert desk.executor.held_bytes == 0

    run_in_virtual_time(work())


# --- engines ----------------------------------------------------------------------------------------


def test_the_streams_of_a_dead_model_are_stopped() -> None:
    """A request found it dead: Triton lets the others hang."""

    async def work() -> None:
        desk = Desk()
        finder, other, elsewhere = (desk.start(sized()) for _ in range(3))
        elsewhere.target = ("b:1", "m")
        finder.seconds, finder.outcome = 1.0, (AttemptOutcome.RETURNED, LOST)
        finder.model_is_dead = True
        await asyncio.sleep(2)
        assert (other.is_over, elsewhere.is_over) == (True, False)
        ends = await desk.until_all_ended()
        outcomes = [(end.result_id, end.outcome) for end in ends]
        assert outcomes == [
            (finder.claim.id, AttemptOutcome.RETURNED),
            (other.claim.id, AttemptOutcome.LOST),
            (elsewhere.claim.id, COMPLETED),
        ]

    run_in_virtual_time(work())


def test_a_text_that_starts_over_does_not_count_for_its_engine() -> None:
    async def work() -> None:
        desk = Desk()
        desk.start(sized()).starts_over = True
        await desk.until_all_ended()
        assert desk.outcomes == []

    run_in_virtual_time(work())


def test_a_silent_target_is_probed_once_at_a_time() -> None:
    """Other targets are probed beside it; all streams of a dead one are stopped."""

    async def work() -> None:
        desk = Desk()
        first, second = desk.start(sized()), desk.start(sized())
        first.seconds = second.seconds = 1e6
        second.target = ("b:1", "m")
        watching = asyncio.create_task(desk.executor.watch_silence())
        await asyncio.sleep(1)
        desk.silent = [first.target, second.target]
        await asyncio.sleep(5.5)  # looks at 2, 4 and 6 s
        assert desk.probes == desk.silent
        await asyncio.sleep(2)  # the probes ended at 7 s, and begin again at 8 s
        assert desk.probes == desk.silent * 2
        desk.dead = {first.target}
        await asyncio.sleep(5)
        assert (first.is_over, second.is_over) == (True, False)
        watching.cancel()
        await asyncio.wait([watching])
        await desk.executor.abandon()

    run_in_virtual_time(work())


def test_a_heartbeat_reports_the_load_of_each_model() -> None:
    died_at = datetime.now(UTC)

    async def work() -> None:
        desk = Desk()
        claims = [sized(), replace(sized(), model_name="n")]
        for claim in claims:
            desk.start(claim).say("x", tokens=30)
        resume = Resume("y", b"\1\0\0\0" * 50, completion_tokens=50)
        desk.start(claim_of(resume=resume)).say("x", tokens=30)
        failed = desk.start(sized())
        failed.outcome = (FAILED, CANCELLED)
        returned = desk.start(sized())
        returned.outcome = (AttemptOutcome.RETURNED, None)
        await asyncio.sleep(5)
        empty = {"running": 0, "tokens_per_second": 0.0, "results_per_second": 0.0}
        load = desk.executor.load(5.0)
        assert orjson.loads(load.models) == {
            "m": empty | {"running": 4}, "n": empty | {"running": 1}, "idle": empty,
        }  # fmt: skip
        assert load.servers == "{}"
        await desk.until_all_ended()
        desk.found_dead = {"o": {"a": DeadEngine(died_at, "ill")}}
        models = orjson.loads(desk.executor.load(5.0).models)
        assert models["m"]["tokens_per_second"] == 12.0  # 60 in 5 s
        assert models["n"]["tokens_per_second"] == 6.0
        # Three of model m ended in 5 s, after 5 s without any that count a little less.
        assert models["m"]["results_per_second"] == pytest.approx(3 / (5 + 5 * 0.846), abs=1e-3)
        assert models["o"]["dead"] == {"a": {"since": died_at.isoformat(), "reason": "ill"}}
        assert orjson.loads(desk.executor.load(5.0).models)["m"]["tokens_per_second"] == 0.0

    run_in_virtual_time(work())
