"""Notifications, errors and the end of a worker's life, by a virtual clock."""

import asyncio
from typing import cast
from uuid import uuid4

import pytest

from app.core import metrics
from app.core.errors import CANCELLED as CANCELLED_FAILURE, DatabaseUnavailableError
from app.core.ids import new_id
from app.core.listener import APPENDED, CANCELLED, ENDED, ENQUEUED, WATCHED
from app.queue.finish import AttemptEnd, AttemptOutcome
from tests.unit.worker.worker_bench import SETTINGS, Service, run


def test_the_end_of_a_result_wakes_a_worker_whose_queue_has_running_limits() -> None:
    async def work(service: Service) -> None:
        service.has_running_limits = True
        async with service.working():
            service.notify(ENDED, str(uuid4()))
            await asyncio.sleep(1)
            assert service.ask_times() == [0, 1]

    run(work)


def test_a_changed_backend_is_claimed_for_and_reported_at_once() -> None:
    async def work(service: Service) -> None:
        async with service.working():
            beats = service.heart.beats
            service.on_backend_change()
            await asyncio.sleep(1)
            assert service.ask_times() == [0, 1]
            assert service.heart.beats == beats + 1

    run(work)


def test_results_are_cancelled_by_notification_or_by_the_next_heartbeat() -> None:
    """A notification without ids comes after a reconnection: some may be lost."""

    async def work(service: Service) -> None:
        claims = [service.add(), service.add()]
        async with service.working():
            beats = service.heart.beats
            service.notify(CANCELLED, claims[0].id.hex)
            await asyncio.sleep(1)
            assert service.running() == [claims[1].id]
            (end,) = cast(list[AttemptEnd], service.ends.items)
            assert (end.result_id, end.failure) == (claims[0].id, CANCELLED_FAILURE)
            assert service.heart.beats == beats
            service.notify(CANCELLED)
            await asyncio.sleep(1)
            assert service.running() == [claims[1].id]
            assert service.heart.beats == beats + 1

    run(work)


def test_text_that_a_reader_elsewhere_announces_is_written_soon() -> None:
    async def work(service: Service) -> None:
        claim = service.add()
        async with service.working():
            service.attempts[claim.id].say("text")
            await asyncio.sleep(1)
            assert service.notified == []
            service.notify(WATCHED, f"{uuid4().hex} {claim.id.hex}")
            await asyncio.sleep(1)
            assert service.notified == [[(APPENDED, claim.id.hex)]]

    run(work)


def test_a_worker_ignores_notifications_until_it_is_registered() -> None:
    """The listener may connect before the worker has an id."""

    async def work(service: Service) -> None:
        claim = service.add()
        for payload in (claim.id.hex, ""):
            service.notify(CANCELLED, payload)
        async with service.working():
            assert service.running() == [claim.id]
            assert service.heart.beats == 1

    run(work)


def test_notifications_before_and_after_a_life_do_nothing() -> None:
    async def work(service: Service) -> None:
        async with service.working():
            pass
        for channel in (CANCELLED, ENDED, ENQUEUED):
            service.notify(channel, new_id().hex if channel != ENQUEUED else "")
        service.notify(CANCELLED)
        service.notify(WATCHED, f"{uuid4().hex} {new_id().hex}")
        service.on_backend_change()
        assert len(service.asked) == 1

    run(work)


# --- errors and the end -----------------------------------------------------------------------------


def test_a_claim_without_a_database_is_repeated_and_any_other_error_ends_the_worker() -> None:
    async def work(service: Service) -> None:
        service.errors = [DatabaseUnavailableError("away")]
        service.add()
        running = asyncio.create_task(service.worker.run())
        await asyncio.sleep(1)
        assert service.running() == []
        service.notify(ENQUEUED)
        await asyncio.sleep(1)
        assert len(service.running()) == 1
        service.errors = [RuntimeError("a bug")]
        service.notify(ENQUEUED)
        with pytest.raises(RuntimeError, match="a bug"):
            await running
        assert service.running() == []
        assert service.is_closed

    run(work)


def test_a_stopping_worker_ends_its_life_in_order() -> None:
    async def work(service: Service) -> None:
        short, long = service.add(), service.add()
        async with service.working():
            (life,) = service.registered
            is_dispatcher = service.dispatcher is service.worker
            assert is_dispatcher
            service.worker.stop()
            service.add()
            service.notify(ENQUEUED)
        assert service.now() == 10  # its results have ended: it waits no longer
        ends = cast(list[AttemptEnd], service.ends.items)
        assert {(end.result_id, end.outcome) for end in ends} == {
            (short.id, AttemptOutcome.COMPLETED), (long.id, AttemptOutcome.COMPLETED),
        }  # fmt: skip
        assert len(service.waiting) == 1
        assert service.retired == [life]
        assert service.dispatcher is None
        assert service.is_closed

    run(work)


def test_an_idle_worker_stops_at_once_and_leaves_no_task() -> None:
    async def work(service: Service) -> None:
        async with service.working():
            pass
        assert service.now() == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work)


def test_a_fenced_worker_comes_back_under_a_new_id() -> None:
    async def work(service: Service) -> None:
        claim = service.add()
        before = metrics.FENCES.value
        async with service.working():
            service.heart.declared_dead.update(service.registered)
            service.on_backend_change()  # a heartbeat
            await asyncio.sleep(1)
            first, second = service.registered
            assert first != second
            assert service.retired == [first]
            assert service.worker.worker_id == second
            assert metrics.FENCES.value - before == 1
            assert service.attempts[claim.id].is_over
            assert service.ends.items == []
            service.add()
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert len(service.running()) == 1

    run(work)


@pytest.mark.parametrize("stops", [True, False])
def test_a_worker_waits_for_the_database_unless_it_is_stopped(stops: bool) -> None:
    async def work(service: Service) -> None:
        service.outages = 3
        async with service.working():
            assert service.registered == []
            if not stops:
                await asyncio.sleep(20)
                assert service.ask_times() == [15]
        assert len(service.retired) == (0 if stops else 1)
        assert service.is_closed

    run(work)


def test_a_worker_ends_without_a_database() -> None:
    async def work(service: Service) -> None:
        service.can_retire = False
        async with service.working():
            pass
        assert (service.dispatcher, service.retired) == (None, [])
        assert service.is_closed

    run(work)


def test_half_of_the_memory_is_used_unless_a_setting_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.worker.worker.available_memory", lambda: 4_000)
    monkeypatch.setattr(SETTINGS, "worker_memory_bytes", None)

    async def work(service: Service) -> None:
        assert service.worker._memory_bytes == 2_000

    run(work)
