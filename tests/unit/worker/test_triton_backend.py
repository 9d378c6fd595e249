"""Server and slots of a generation, and the outcome of its errors."""

import asyncio
from dataclasses import replace

import pytest

from app.core import metrics
from app.core.errors import Failure, FailureCode
from app.inference.triton_client import CannotContinueError
from app.inference.triton_errors import (
    EngineDeadError,
    EngineUnhealthyError,
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
    UnclearError,
)
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.worker.backends.triton_backend import Generation
from tests.unit.worker.scripted_servers import Bench, OnDelta, delta, target
from tests.unit.worker.test_attempt import claim_of
from tests.virtual_time import run_in_virtual_time

COMPLETED, FAILED = AttemptOutcome.COMPLETED, AttemptOutcome.FAILED
LOST, RETURNED = AttemptOutcome.LOST, AttemptOutcome.RETURNED
ID = b"\1\0\0\0"


async def ended(attempt: Generation) -> tuple[AttemptOutcome, FailureCode | None]:
    end = await attempt.run()
    assert end is not None
    return end.outcome, end.failure.code if end.failure else None


# --- slots ------------------------------------------------------------------------------------------


async def test_the_free_slots_of_a_server_are_shared_between_its_models() -> None:
    """The model of which it runs least gets the rest."""
    bench = Bench(7)
    bench.serve("m", "n", "o")
    (server,) = bench.servers
    server.running.update({"m": 1, "o": 1})
    assert bench.backend.free([]) == {"m": 2, "n": 2, "o": 1}
    assert bench.backend.free([], {"m"}) == {"n": 3, "o": 2}
    server.running["n"] += 3
    assert bench.backend.free([]) == {"m": 1, "o": 1}
    server.running["m"] += 2
    assert bench.backend.free([]) == {}
    server.running["m"] += 1  # more than its slots, which an operator may reduce
    assert bench.backend.free([]) == {}
    assert bench.backend.free([], {"m", "n", "o"}) == {}


async def test_a_server_with_one_free_slot_gives_it_away() -> None:
    assert Bench(1).backend.free([]) == {"m": 1}


async def test_the_slots_of_all_servers_that_are_trusted_add_up() -> None:
    bench = Bench(2, 3, 4)
    assert bench.backend.free([]) == {"m": 9}
    bench.backend.health.record(StreamLostError("gone"), target("b"))
    assert bench.backend.free([]) == {"m": 6}
    assert bench.backend.free([], {"m"}) == {}
    await bench.backend.close()


async def test_an_attempt_that_is_about_to_choose_a_server_takes_a_slot() -> None:
    """One that has a server is counted there."""
    bench = Bench(3)
    choosing = [bench.generation() for _ in range(2)]
    assert bench.backend.free([*choosing, bench.on(bench.servers[0], 0.0)]) == {"m": 1}
    assert bench.backend.free([*choosing, bench.generation()]) == {}


async def test_the_server_with_the_most_room_for_its_size_is_chosen() -> None:
    bench = Bench(2, 10, 10)
    first, second, third = bench.servers
    assert bench.backend.choose("m") is first  # of equal ones the first by name
    first.running["m"] += 1
    second.running["m"] += 3
    third.running["n"] += 4
    assert bench.backend.choose("m") is second
    assert bench.backend.choose("m", {"b"}) is third
    assert bench.backend.choose("m", {"b", "c"}) is first
    assert bench.backend.choose("m", {"a", "b", "c"}) is None
    assert bench.backend.choose("n") is None
    bench.backend.health.record(StreamLostError("gone"), target("b"))
    assert bench.backend.choose("m") is third
    assert bench.backend.choose("m", {"c"}) is first
    await bench.backend.close()


def test_a_result_waits_a_moment_for_the_probe_of_its_only_server() -> None:
    async def work() -> list[float]:
        bench, waits = Bench(1), []
        (server,), (client,) = bench.servers, bench.clients
        for seconds in (0.5, 20.0):

            async def answer(on_delta: OnDelta, seconds: float = seconds) -> None:
                await asyncio.sleep(seconds)
                on_delta(delta())

            client.answer = answer
            assert await bench.backend.choose_settled("m") is server
            bench.backend.health.record(StreamLostError("gone"), target("a"))
            began = asyncio.get_running_loop().time()
            assert await bench.backend.choose_settled("m") is (server if seconds < 1 else None)
            waits.append(asyncio.get_running_loop().time() - began)
        await bench.backend.close()
        return waits

    assert run_in_virtual_time(work()) == [0.5, 1.0]


async def test_running_results_are_counted_by_server() -> None:
    bench = Bench(1, 1)
    first, second = bench.servers
    attempts = [bench.on(first, 0.0), bench.on(second, 0.0), bench.on(second, 0.0)]
    assert bench.backend.servers([*attempts, bench.generation()]) == {"a": 1, "b": 2}


def test_a_target_is_silent_by_its_oldest_request() -> None:
    """For longer than the engine's share of the time; a younger request does not make it answer."""

    async def work() -> None:
        bench = Bench(4, 4, silence_seconds=100.0)  # 40 s without an answer
        (first, second), now = bench.servers, asyncio.get_running_loop().time()
        for asked in ((now - 41, now - 1), (now - 1, now - 41)):
            attempts = [bench.on(first, at) for at in asked]
            attempts += [bench.on(second, now - 39), bench.generation()]
            assert bench.backend.silent_targets(attempts) == [target("a")]
        first.heard_at["m"] = now - 39
        assert bench.backend.silent_targets([bench.on(first, now - 900)]) == []
        first.heard_at["m"] = now - 41
        assert bench.backend.silent_targets([bench.on(first, now - 39)]) == []
        bench.pool._servers.clear()
        assert bench.backend.silent_targets([bench.on(first, now - 900)]) == []

    run_in_virtual_time(work())


async def test_a_completed_result_ends_the_row_of_losses() -> None:
    bench = Bench(1, 1)
    bench.backend.health.record(StreamLostError("gone"), target("a"))
    losses = bench.backend.health._breaker._losses
    failed, completed = (AttemptEnd(claim_of().id, 1, outcome) for outcome in (FAILED, COMPLETED))
    bench.backend.record_outcome(target("a"), failed)
    assert losses == {target("a"): 1}
    bench.backend.record_outcome(target("a"), completed)
    assert losses == {}
    bench.backend.health.record(StreamLostError("gone again"), target("a"))
    other = Failure(FailureCode.INVALID_OUTPUT, "a whole text", False)
    bench.backend.record_outcome(target("a"), replace(failed, failure=other))
    assert losses == {}
    await bench.backend.close()


def test_the_worker_learns_of_changed_models_and_of_changed_engines() -> None:
    async def work() -> None:
        bench, changes = Bench(1), list[int]()
        bench.backend.on_change(lambda: changes.append(1))
        (from_registry,) = bench.registry.handlers
        from_registry()
        bench.backend.health.record(EngineDeadError("dead"), target("a"))
        assert len(changes) == 2
        await bench.backend.close()

    run_in_virtual_time(work())


# --- errors -----------------------------------------------------------------------------------------

ERRORS = [
    (NotTakenError("busy"), (RETURNED, FailureCode.TRITON_LOST), "not_taken", 1),
    (ModelDeadError("stub"), (RETURNED, FailureCode.TRITON_LOST), "dead", 1),
    (EngineUnhealthyError("ill"), (RETURNED, FailureCode.TRITON_LOST), "dead", 1),
    (StreamLostError("cut"), (LOST, FailureCode.TRITON_LOST), "lost", 1),
    (EngineDeadError("dead"), (LOST, FailureCode.TRITON_LOST), "dead", 1),
    (RefusedError("no"), (FAILED, FailureCode.INVALID_REQUEST), "refused", 0),
    (ModelFailedError("bug"), (FAILED, FailureCode.MODEL_ERROR), "failed", 0),
    (GenerationError("?"), (LOST, FailureCode.TRITON_LOST), metrics.OTHER, 0),
]


@pytest.mark.parametrize(("error", "outcome", "kind", "is_suspect"), ERRORS)
async def test_an_error_is_counted_once_and_decides_about_result_and_engine(
    error: GenerationError,
    outcome: tuple[AttemptOutcome, FailureCode],
    kind: str,
    is_suspect: int,
) -> None:
    bench = Bench(1)
    bench.clients[0].raise_always(error)
    before = metrics.TRITON_ERRORS.of("m", kind).value
    attempt = bench.generation()
    end = await attempt.run()
    assert end is not None
    assert end.failure is not None
    assert (end.outcome, end.failure.code) == outcome
    assert end.failure.retryable is (end.failure.code is not FailureCode.INVALID_REQUEST)
    assert metrics.TRITON_ERRORS.of("m", kind).value - before == 1
    assert bench.backend.health.allows(target("a")) is not bool(is_suspect)
    is_dead = isinstance(error, ModelDeadError | EngineUnhealthyError | EngineDeadError)
    assert ("m" in bench.backend.dead_engines()) is is_dead
    assert attempt.model_is_dead is isinstance(error, ModelDeadError)
    await bench.backend.close()


async def test_a_result_that_one_server_does_not_take_runs_on_the_next() -> None:
    """Each server is tried once."""
    for error in (NotTakenError("busy"), CannotContinueError("old")):
        bench = Bench(9, 9, 9)
        bench.clients[0].raise_always(error)
        bench.clients[1].raise_always(error)
        attempt = bench.generation()
        assert await ended(attempt) == (COMPLETED, None)
        assert attempt.server is bench.servers[2]
        assert attempt.target == target("c")
        is_away = isinstance(error, NotTakenError)
        assert bench.backend.health.allows(target("a")) is not is_away
        await bench.backend.close()


async def test_a_result_that_no_server_takes_goes_back_with_the_reason() -> None:
    bench = Bench(9, 9)
    for client in bench.clients:
        client.raise_always(NotTakenError(f"{client.address} is full"))
    end = await bench.generation().run()
    assert end is not None
    assert end.failure is not None
    assert "b:1 is full" in end.failure.message
    await bench.backend.close()
    bench.serve()
    end = await bench.generation().run()
    assert end is not None
    assert end.outcome is RETURNED
    assert end.failure is not None
    assert "no server has model m ready" in end.failure.message


def test_a_server_that_refused_a_result_is_not_tried_again_by_the_same_attempt() -> None:
    """Although it answers a probe before the next server has refused, too."""

    async def work() -> None:
        bench = Bench(9, 9)
        first, second = bench.clients

        async def refuse(on_delta: OnDelta) -> None:
            if first.requests[-1].prompt == "p":
                raise NotTakenError("busy")
            on_delta(delta())

        async def refuse_later(_: OnDelta) -> None:
            await asyncio.sleep(5)
            raise NotTakenError("busy")

        first.answer, second.answer = refuse, refuse_later
        outcome, _ = await ended(bench.generation())
        assert outcome is RETURNED
        assert bench.backend.health.allows(target("a"))
        assert [one.prompt for one in first.requests].count("p") == 1
        await bench.backend.close()

    run_in_virtual_time(work())


async def test_another_server_never_continues_an_answer() -> None:
    """A server that stops after its first words had taken the request."""
    bench = Bench(9, 9)

    async def answer_and_refuse(on_delta: OnDelta) -> None:
        on_delta(delta(finish_reason=None))
        raise NotTakenError("unloaded")

    bench.clients[0].answer = answer_and_refuse
    assert await ended(bench.generation()) == (LOST, FailureCode.TRITON_LOST)
    assert bench.clients[1].requests == []
    await bench.backend.close()


async def test_a_stream_without_an_end_is_lost() -> None:
    bench = Bench(1)

    async def answer(on_delta: OnDelta) -> None:
        on_delta(delta(finish_reason=None))

    bench.clients[0].answer = answer
    assert await ended(bench.generation()) == (LOST, FailureCode.TRITON_LOST)


@pytest.mark.parametrize("answers", [True, False])
async def test_an_unclear_error_is_that_of_the_model_if_a_probe_is_answered(answers: bool) -> None:
    bench = Bench(1)
    (client,) = bench.clients

    async def answer(on_delta: OnDelta) -> None:
        if not answers or len(client.requests) == 1:
            raise UnclearError("strange")
        on_delta(delta())

    client.answer = answer
    code = FailureCode.MODEL_ERROR if answers else FailureCode.TRITON_LOST
    assert await ended(bench.generation()) == (FAILED if answers else LOST, code)
    await bench.backend.close()


async def test_a_result_occupies_its_server_while_it_runs() -> None:
    bench = Bench(1)
    (server,), counts = bench.servers, list[int]()

    async def answer(on_delta: OnDelta) -> None:
        counts.append(server.running["m"])
        on_delta(delta())

    bench.clients[0].answer = answer
    await bench.generation().run()
    assert (counts, server.running["m"]) == ([1], 0)
