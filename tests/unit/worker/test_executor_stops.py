"""Attempts that are stopped from outside: by the database's rows, by users, by the worker's end."""

import asyncio
import logging
from typing import Any, cast
from uuid import UUID

import pytest

from app.core import logs, tracing
from app.core.database import Connection
from app.core.errors import CANCELLED
from app.core.ids import new_id
from app.queue.claim import Claim
from app.queue.finish import AttemptOutcome
from tests.unit.worker.desk import Desk, sized
from tests.unit.worker.test_attempt import claim_of
from tests.unit.worker.test_attempt_trace import Spans
from tests.virtual_time import run_in_virtual_time

COMPLETED, FAILED = AttemptOutcome.COMPLETED, AttemptOutcome.FAILED
RETURNED = AttemptOutcome.RETURNED


class Rows:
    """The rows of the results that the worker owns: attempt and cancellation."""

    def __init__(self, *owned: tuple[UUID, int, bool]) -> None:
        self.owned = owned

    async def fetch(self, _sql: str, _worker: UUID) -> list[dict[str, Any]]:
        await asyncio.sleep(1)  # in virtual time
        names = "id", "attempt", "is_cancelled"
        return [dict(zip(names, row, strict=True)) for row in self.owned]


async def check(desk: Desk, *owned: tuple[UUID, int, bool]) -> None:
    await desk.executor.check_owned(cast(Connection, Rows(*owned)))


def test_a_heartbeat_stops_results_that_were_cancelled_or_ended_elsewhere() -> None:
    async def work() -> None:
        desk = Desk()
        kept, cancelled, ended, newer = (desk.start(sized()) for _ in range(4))
        await check(
            desk,
            (kept.claim.id, 3, False),
            (cancelled.claim.id, 3, True),
            (newer.claim.id, 4, False),
        )
        await asyncio.sleep(0.01)
        flags = [one.is_over for one in (kept, cancelled, ended, newer)]
        assert flags == [False, True, True, True]
        ends = {end.result_id: end for end in await desk.until_all_ended()}
        assert ends[kept.claim.id].outcome is COMPLETED
        assert {ends[one.claim.id].failure for one in (cancelled, ended, newer)} == {CANCELLED}

    run_in_virtual_time(work())


def test_a_heartbeat_spares_attempts_that_began_while_it_read() -> None:
    """The rows are older than a claim that has arrived in the meantime."""

    async def work() -> None:
        desk, claim = Desk(), sized()
        first = desk.start(claim)
        checking = asyncio.create_task(check(desk))
        await asyncio.sleep(0.5)
        young = desk.start(sized())
        second = desk.start(claim)  # in place of the first
        await checking
        await asyncio.sleep(0.01)
        assert [one.is_over for one in (first, young, second)] == [False] * 3
        await desk.executor.abandon()

    run_in_virtual_time(work())


def test_a_row_that_does_not_run_is_handed_back_after_the_longest_statement() -> None:
    """Five seconds here. One that runs at any heartbeat in between is not."""

    async def work() -> None:
        desk = Desk()
        lost, late = new_id(), sized()
        for _ in range(5):
            await check(desk, (lost, 7, False), (late.id, 3, False))
        assert desk.ends.items == []
        desk.start(late)
        await check(desk, (lost, 7, False), (late.id, 3, False))
        assert desk.executor._unknown.keys() == {lost}
        await check(desk, (lost, 7, False), (late.id, 3, False))
        await asyncio.sleep(0.01)
        (end,) = cast(list[Any], desk.ends.items)
        assert (end.result_id, end.attempt, end.outcome, end.keeps_text) == (
            lost,
            7,
            RETURNED,
            True,
        )
        await check(desk)
        assert desk.executor._unknown == {}
        await desk.executor.abandon()

    run_in_virtual_time(work())


def test_a_user_cancels_running_results_alone() -> None:
    async def work() -> None:
        desk = Desk()
        cancelled, kept = desk.start(sized()), desk.start(sized())
        desk.executor.cancel([new_id(), cancelled.claim.id])
        await asyncio.sleep(0.01)
        assert (cancelled.is_over, kept.is_over) == (True, False)
        await desk.executor.abandon()

    run_in_virtual_time(work())


# --- the worker's end -------------------------------------------------------------------------------


def test_a_stopping_worker_waits_for_its_results_and_hands_back_the_rest() -> None:
    """Ends during the stop are no sign of an engine's health."""

    async def work() -> None:
        desk = Desk()
        short, long = desk.start(sized()), desk.start(sized())
        short.seconds, long.seconds = 2.0, 1e6
        desk.ends.seconds = 1.0
        began = asyncio.get_running_loop().time()
        await desk.executor.finish(20.0, 5.0, [])
        assert asyncio.get_running_loop().time() - began == 21
        assert desk.outcomes == []
        ends = await desk.until_all_ended()
        assert [end.outcome for end in ends] == [COMPLETED, RETURNED]
        assert len(desk.ended) == 2

    run_in_virtual_time(work())


def test_a_stop_without_results_takes_no_time() -> None:
    async def work() -> None:
        began = asyncio.get_running_loop().time()
        await Desk().executor.finish(20.0, 5.0, [])
        assert asyncio.get_running_loop().time() == began

    run_in_virtual_time(work())


def test_a_stop_ends_when_its_time_is_up() -> None:
    async def work() -> None:
        desk = Desk()
        desk.start(sized()).seconds = 1e6
        desk.ends.seconds = 1e6
        began = asyncio.get_running_loop().time()
        await desk.executor.finish(20.0, 5.0, [])
        assert asyncio.get_running_loop().time() - began == 25
        await desk.executor.abandon()

    run_in_virtual_time(work())


def test_a_heartbeat_that_dies_ends_the_stop() -> None:
    async def work() -> None:
        desk = Desk()
        desk.start(sized())

        async def die() -> None:
            await asyncio.sleep(3)
            raise RuntimeError("fenced")

        side_tasks = [asyncio.create_task(asyncio.sleep(1e6)), asyncio.create_task(die())]
        began = asyncio.get_running_loop().time()
        with pytest.raises(RuntimeError, match="fenced"):
            await desk.executor.finish(20.0, 5.0, side_tasks)
        assert asyncio.get_running_loop().time() - began == 3
        await desk.executor.abandon()
        side_tasks[0].cancel()
        left = asyncio.all_tasks() - {asyncio.current_task(), side_tasks[0]}
        assert not left

    run_in_virtual_time(work())


def test_an_abandoned_attempt_writes_nothing() -> None:
    """Another worker may own its result; readers here look for the text elsewhere."""

    async def work() -> None:
        desk, early = Desk(), sized()
        attempt, stored = desk.start(claim_of(resumable=True)), desk.start(sized())
        desk.executor.begin([early])
        stored.seconds, desk.ends.seconds = 0.0, 1e6
        attempt.say("text")
        await asyncio.sleep(1)
        assert len(desk.ends.items) == 1
        with desk.hub.reading("red", attempt.claim.id) as signal:
            await desk.executor.abandon()
            assert signal.is_set()
        assert (desk.executor.running, desk.executor.tasks) == ({}, set())
        assert desk.hub.running(attempt.claim.id) is None
        assert {claim.id for claim in desk.ended} == {attempt.claim.id, stored.claim.id}
        assert len(desk.ends.items) == 1
        assert desk.chunks.items == []
        assert desk.ends.is_closed
        assert desk.chunks.is_closed

    run_in_virtual_time(work())


def test_an_attempt_that_is_abandoned_before_its_first_step_is_forgotten() -> None:
    """Its task never begins, so that it has no end of its own."""

    async def work() -> None:
        desk, claim = Desk(), sized()
        with desk.hub.reading("red", claim.id) as signal:
            attempt = desk.start(claim)
            assert desk.hub.running(claim.id) is attempt
            signal.clear()
            await desk.executor.abandon()
            assert signal.is_set()
        assert (desk.executor.running, desk.hub.running(claim.id)) == ({}, None)
        assert desk.ended == []

    run_in_virtual_time(work())


# --- traces and logs --------------------------------------------------------------------------------


def test_an_attempt_leaves_spans_of_its_wait_and_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = Spans()
    monkeypatch.setattr(tracing, "active", cast(tracing.Tracing, spans))

    async def work() -> None:
        desk = Desk()
        claim = Claim(new_id(), 1, "m", "p", {}, 60.0, is_suspect=False, trace="00-1-2-01")
        desk.start(claim)
        await desk.until_all_ended()

    run_in_virtual_time(work())
    assert [name for name, *_ in spans.found] == ["queue", "finish"]


@pytest.mark.parametrize(
    ("level", "shows_content", "lines"),
    [
        (logging.DEBUG, False, [logging.DEBUG] * 2),
        (logging.INFO, True, [logging.INFO] * 2),
        (logging.INFO, False, []),
    ],
)
def test_an_end_is_logged_with_its_texts_only_if_content_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    level: int,
    shows_content: bool,
    lines: list[int],
) -> None:
    monkeypatch.setattr(logs, "_shows_content", shows_content)
    caplog.set_level(level, "app.worker.attempt_executor")

    async def work() -> list[Claim]:
        desk = Desk()
        completed, cancelled = desk.start(sized()), desk.start(sized())
        completed.say("text")
        desk.executor.cancel([cancelled.claim.id])
        await desk.until_all_ended()
        return [cancelled.claim, completed.claim]

    claims = run_in_virtual_time(work())
    found = [record for record in caplog.records if record.name == "app.worker.attempt_executor"]
    assert [record.levelno for record in found] == lines
    for record, claim, code, output in zip(
        found, claims, ("cancelled", None), ("", "text"), strict=False
    ):
        extra = vars(record)
        assert extra["result_id"] == str(claim.id)
        assert extra["attempt"] == 3
        assert extra["code"] == code
        assert extra.get("prompt") == ("p" if shows_content else None)
        assert extra.get("output") == (output if shows_content else None)


def test_an_end_that_was_decided_elsewhere_is_no_end_of_this_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "app.worker.attempt_executor")

    async def work() -> None:
        desk = Desk()
        desk.ends.is_ours = False
        desk.start(sized())
        await desk.until_all_ended()

    run_in_virtual_time(work())
    assert [vars(record)["action"] for record in caplog.records] == ["not_ours"]
