"""Claims and slots of a worker, by a virtual clock."""

import asyncio
from dataclasses import replace
from uuid import uuid4

from app.core.errors import DatabaseUnavailableError
from app.core.listener import ENDED, ENQUEUED
from tests.unit.worker.test_attempt import claim_of
from tests.unit.worker.worker_bench import Service, run


def test_an_idle_worker_polls_and_is_woken_by_new_results() -> None:
    """One claim each time; results that end do not wake it, for its slots were no limit."""

    async def work(service: Service) -> None:
        async with service.working():
            await asyncio.sleep(130)
            assert service.ask_times() == [0, 60, 120]
            service.add()
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert len(service.running()) == 1
            await asyncio.sleep(20)
            assert service.running() == []
            assert service.ask_times() == [0, 60, 120, 131]
            service.notify(ENDED, "x")
            await asyncio.sleep(1)
            assert len(service.asked) == 4

    run(work)


def test_a_full_worker_claims_as_soon_as_a_slot_is_free() -> None:
    async def work(service: Service) -> None:
        for _ in range(5):
            service.add()
        async with service.working():
            assert len(service.running()) == 2
            assert service.asked == [(0, {"m": 2})]
            await asyncio.sleep(10)
            assert len(service.running()) == 2
            await asyncio.sleep(10)
            assert len(service.running()) == 1
            await asyncio.sleep(10)
            assert len(service.ends.items) == 5
            assert {at for at, _ in service.asked} == {0, 10, 20}

    run(work)


def test_a_queue_that_was_found_empty_leaves_its_share_to_others() -> None:
    """Until the worker is woken. A slot of another one that was free meanwhile is claimed for."""

    async def work(service: Service) -> None:
        service.slots = {"m": 2, "n": 2}
        claims = [service.add(model="n") for _ in range(2)]
        service.on_claim = [lambda: service.slots.update(n=3)]
        async with service.working():
            assert service.asked == [(0, {"m": 2, "n": 2}), (0, {"n": 1})]
            assert service.running() == [claim.id for claim in claims]
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert service.asked[2:] == [(1, {"m": 2, "n": 1})]
            await asyncio.sleep(10)  # all queues are empty: ends wake no worker
            assert len(service.asked) == 3

    run(work)


def test_a_worker_with_an_empty_and_a_full_queue_claims_at_each_end() -> None:
    async def work(service: Service) -> None:
        service.slots = {"m": 2, "n": 1}
        for _ in range(2):
            service.add(model="n")
        async with service.working():
            await asyncio.sleep(10)
            assert service.asked == [(0, {"m": 2, "n": 1}), (10, {"m": 2, "n": 1})]
            assert service.waiting == []

    run(work)


def test_claims_stop_where_memory_does() -> None:
    """The last result may exceed it. A result that ends makes room, and wakes the worker."""

    async def work(service: Service) -> None:
        service.slots = {"m": 9}
        for size in (999, 500, 1):
            service.add(size=size)
        async with service.working():
            assert len(service.running()) == 2
            asked = len(service.asked)
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert len(service.asked) == asked
            assert service.worker.reserve([("m", 1)]) == [False]
            await asyncio.sleep(9)
            assert service.waiting == []

    run(work)


def test_exactly_full_memory_has_no_room() -> None:
    async def work(service: Service) -> None:
        service.slots = {"m": 9}
        service.add(size=999)
        async with service.working():
            service.add(size=1)
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert service.waiting == []
            service.add(size=1)
            asked = len(service.asked)
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert len(service.asked) == asked
            assert len(service.waiting) == 1

    run(work)


def test_a_worker_whose_memory_is_full_claims_at_the_next_end() -> None:
    """Although its claim had left the queue empty. One byte less is room for a result."""

    async def work(service: Service) -> None:
        service.slots = {"m": 9}
        service.add(size=1_000)
        async with service.working():
            assert service.ask_times() == [0]
            await asyncio.sleep(10)
            assert service.ask_times() == [0, 10]
            service.add(size=999)
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert service.worker.reserve([("m", 1)]) == [True]
            await asyncio.sleep(10)
            assert service.ask_times() == [0, 10, 11, 11]  # twice: the first took all of its share

    run(work)


def test_a_claim_gets_half_of_the_room_and_what_begins_beside_it_the_rest() -> None:
    async def work(service: Service) -> None:
        service.slots = {"m": 9}
        reserved: list[list[bool]] = []
        async with service.working():

            def reserve() -> None:
                reserved.append(service.worker.reserve([("m", 400), ("m", 100), ("m", 1)]))

            service.add(size=1)
            service.on_claim = [reserve]
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert reserved == [[True, True, False]]
            assert service.worker.reserve([("m", 998), ("m", 1), ("m", 1)]) == [True, True, False]

    run(work)


def test_a_claim_that_took_its_half_is_followed_by_one_for_the_rest() -> None:
    async def work(service: Service) -> None:
        service.slots = {"m": 9}
        for _ in range(4):
            service.add(size=300)
        async with service.working():
            assert len(service.running()) == 4
            assert service.ask_times() == [0, 0, 0]
            service.slots = {"m": 10}
            assert service.worker.reserve([("m", 1)]) == [False]

    run(work)


def test_a_failed_claim_keeps_no_room() -> None:
    async def work(service: Service) -> None:
        service.errors = [DatabaseUnavailableError("away")]
        async with service.working():
            assert service.worker.reserve([("m", 999), ("m", 1)]) == [True, True]

    run(work)


# --- results that need no claim ---------------------------------------------------------------------


def test_slots_and_memory_are_reserved_in_order() -> None:
    async def work(service: Service) -> None:
        service.slots = {"m": 2, "n": 1}
        async with service.working():
            reserve = service.worker.reserve
            wanted = [("m", 1), ("m", 1), ("m", 1), ("n", 1), ("n", 1), ("o", 1)]
            assert reserve(wanted) == [True, True, False, True, False, False]
            assert reserve([("m", 999), ("m", 1), ("n", 1)]) == [True, True, False]
            assert reserve([("m", 1000), ("m", 1)]) == [True, False]
            assert reserve([]) == []
            service.worker.stop()
            assert reserve([("m", 1), ("m", 1)]) == [False, False]

    run(work)


def test_nothing_is_reserved_while_the_queue_has_more_than_slots() -> None:
    async def work(service: Service) -> None:
        for _ in range(3):
            service.add()
        async with service.working():
            await asyncio.sleep(20)
            assert len(service.running()) == 0
            assert service.worker.reserve([("m", 1)]) == [True]
            service.slots = {"m": 0}
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            service.slots = {"m": 2}
            assert service.worker.reserve([("m", 1)]) == [False]

    run(work)


def test_a_reserved_result_runs_before_it_is_stored() -> None:
    async def work(service: Service) -> None:
        async with service.working():
            worker, former = service.worker, uuid4()
            claims = [claim_of(), claim_of()]
            worker.begin(claims)
            await asyncio.sleep(1)
            assert len(service.running()) == 2
            worker.confirm(former, claims)
            worker.abort(former)
            await asyncio.sleep(1)
            assert (len(service.running()), service.hub.running(claims[0].id)) == (2, None)
            worker.confirm(worker.worker_id, claims[:1])
            assert service.hub.running(claims[0].id) is not None
            await asyncio.sleep(1)
            assert service.running() == [claims[0].id]
            worker.begin(claims[1:])
            await asyncio.sleep(1)
            worker.abort(worker.worker_id)
            await asyncio.sleep(1)
            assert service.running() == [claims[0].id]
        worker.confirm(worker.worker_id, [claim_of()])  # too late
        assert service.running() == []

    run(work)


# --- suspects ---------------------------------------------------------------------------------------


def test_suspects_run_one_after_the_other() -> None:
    """They are looked for at each poll, and when one has ended."""

    async def work(service: Service) -> None:
        service.suspects = [replace(claim_of(), is_suspect=True) for _ in range(2)]
        async with service.working():
            assert len(service.running()) == 1
            await asyncio.sleep(30)
            assert service.asked_suspects == [0, 10, 20]
            await asyncio.sleep(100)
            assert service.asked_suspects == [0, 10, 20, 80]
            service.notify(ENQUEUED)
            await asyncio.sleep(1)
            assert service.asked_suspects == [0, 10, 20, 80]

    run(work)


def test_each_end_of_a_suspect_leaves_the_model_to_others_for_as_long_as_it_ran() -> None:
    """Before the next one is looked for; again if the database was unreachable."""

    async def work(service: Service) -> None:
        service.suspects = [replace(claim_of(), is_suspect=True, team_id="t") for _ in range(2)]
        async with service.working():
            await asyncio.sleep(15)
            assert service.pauses == [(10, "m", "t", 10)]
            service.errors.append(DatabaseUnavailableError("away"))
            await asyncio.sleep(100)
            assert service.pauses[1:] == [(80, "m", "t", 10)]

    run(work)


def test_the_time_of_an_engine_that_a_suspect_ended_counts() -> None:
    """Until the model is back the pause begins again and again, and grows: the others had nothing of it."""

    async def work(service: Service) -> None:
        service.suspects = [replace(claim_of(), is_suspect=True, team_id="t")]
        async with service.working():
            service.slots = {}
            await asyncio.sleep(200)
            assert service.pauses == [(at, "m", "t", at) for at in (10, 70, 130, 190)]
            service.slots = {"m": 2}
            service.on_backend_change()
            await asyncio.sleep(100)
            assert service.pauses[4:] == [(201, "m", "t", 201)]

    run(work)


def test_an_engine_that_does_not_come_back_keeps_suspects_from_others_for_a_while() -> None:
    async def work(service: Service) -> None:
        service.suspects = [replace(claim_of(), is_suspect=True, team_id="t")]
        async with service.working():
            service.slots = {}
            await asyncio.sleep(3_000)
            assert [at for at, *_ in service.pauses] == list(range(10, 611, 60))

    run(work)


def test_a_suspect_waits_for_the_end_of_others_for_a_while_only() -> None:
    """No other result begins meanwhile; a single long one must not keep them all waiting."""

    async def work(service: Service) -> None:
        service.suspects = [replace(claim_of(), is_suspect=True, team_id="t")]
        service.is_never_empty = True
        async with service.working():
            await asyncio.sleep(2_500)
            # At each poll; each wait is twice as long, if the polls allow it, and is counted from its begin.
            assert service.pauses[:3] == [
                (60, "m", "t", 60),
                (180, "m", "t", 60),
                (300, "m", "t", 60),
            ]
            assert service.pauses[-2:] == [(1_800, "m", "t", 600), (2_460, "m", "t", 600)]
            service.is_never_empty = False
            await asyncio.sleep(100)  # it runs: a new wait begins short
            service.suspects = [replace(claim_of(), is_suspect=True, team_id="t")]
            service.is_never_empty = True
            known = len(service.pauses)
            await asyncio.sleep(300)
            assert service.pauses[known][3] == 60

    run(work)


def test_a_model_that_is_full_again_is_back() -> None:
    async def work(service: Service) -> None:
        service.slots = {"m": 1}
        service.suspects = [replace(claim_of(), is_suspect=True, team_id="t")]
        async with service.working():
            service.slots = {"m": 0}
            await asyncio.sleep(5)
            begun = [claim_of()]
            service.worker.begin(begun)
            service.worker.confirm(service.worker.worker_id, begun)
            await asyncio.sleep(100)
            assert service.pauses == [(10, "m", "t", 10)]

    run(work)


def test_suspects_are_left_to_workers_with_a_free_slot() -> None:
    async def work(service: Service) -> None:
        service.slots = {"m": 0}
        async with service.working():
            await asyncio.sleep(100)
            assert service.asked_suspects == []

    run(work)
