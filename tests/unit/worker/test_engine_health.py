"""Probes of scripted servers: the state of an engine by each answer, and its reports."""

import asyncio
from datetime import UTC, datetime

import pytest

from app.inference.server_pool import DeadEngine
from app.inference.triton_errors import (
    EngineDeadError,
    GenerationError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
)
from app.worker.backends.circuit_breaker import Probe, ProbeOutcome
from tests.unit.worker.scripted_servers import Bench, OnDelta, delta, target
from tests.virtual_time import run_in_virtual_time

ANSWERED, FAILED, UNREACHED = ProbeOutcome.ANSWERED, ProbeOutcome.FAILED, ProbeOutcome.UNREACHED


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (RefusedError("one token is too few"), ANSWERED),
        (NotTakenError("not ready"), UNREACHED),
        (StreamLostError("cut"), UNREACHED),
        (EngineDeadError("dead"), FAILED),
        (ModelFailedError("bug"), FAILED),
    ],
)
async def test_an_error_of_a_probe_is_that_of_the_engine_or_of_the_way_to_it(
    error: GenerationError, answer: ProbeOutcome
) -> None:
    bench = Bench(1)
    bench.clients[0].raise_always(error)
    probe = await bench.backend.health._probe(target("a"))
    assert probe == Probe(answer, "" if answer is ANSWERED else str(error))
    assert ("m" in bench.servers[0].heard_at) is (answer is ANSWERED)


async def test_a_probe_is_a_generation_of_one_token() -> None:
    bench = Bench(1)
    assert await bench.backend.health._probe(target("a")) == Probe(ANSWERED)
    (request,) = bench.clients[0].requests
    assert request.parameters == {"max_tokens": 1, "temperature": 0}
    assert bench.servers[0].heard_at["m"] > 0
    assert await bench.backend.health._probe(target("b")) == Probe(ProbeOutcome.GONE)


@pytest.mark.parametrize(
    ("answering", "outcome", "reconnections"),
    [("m", ANSWERED, 0), ("another", ProbeOutcome.SILENT, 0), (None, ProbeOutcome.SILENT, 1)],
)
def test_a_probe_waits_half_the_silence_that_an_engine_is_allowed(
    answering: str | None, outcome: ProbeOutcome, reconnections: int
) -> None:
    """An engine whose streams go on meanwhile is full. A connection on which no model
    answers is replaced."""

    async def work() -> None:
        bench, loop = Bench(1, silence_seconds=100.0), asyncio.get_running_loop()
        (server,), (client,) = bench.servers, bench.clients

        async def answer(_: OnDelta) -> None:
            await asyncio.sleep(1)
            if answering is not None:
                server.heard_at[answering] = loop.time()
            await asyncio.sleep(60)

        client.answer = answer
        server.heard_at |= {"m": loop.time(), "another": loop.time()}
        began = loop.time()
        probe = await bench.backend.health._probe(target("a"))
        assert loop.time() - began == 50
        assert (probe.answer, client.reconnections) == (outcome, reconnections)

    run_in_virtual_time(work())


@pytest.mark.parametrize(
    ("seconds", "error", "is_dead"),
    [
        (90.0, None, True),
        (0.0, EngineDeadError("dead"), True),
        (0.0, StreamLostError("cut"), False),
        (0.0, None, False),
    ],
)
def test_a_silent_target_is_dead_if_its_probe_fails_or_is_not_answered(
    seconds: float, error: GenerationError | None, is_dead: bool
) -> None:
    async def work() -> None:
        bench = Bench(1)

        async def answer(on_delta: OnDelta) -> None:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
            on_delta(delta())

        bench.clients[0].answer = answer
        assert await bench.backend.health.is_dead(target("a")) is is_dead
        assert ("m" in bench.servers[0].dead) is is_dead
        await bench.backend.close()

    run_in_virtual_time(work())


def test_a_dead_engine_is_known_by_server_and_model_until_it_answers() -> None:
    """Each change is reported, and the models are read again before the backend is closed."""

    async def work() -> None:
        bench, changes = Bench(2, 2), list[int]()
        bench.backend.health.on_change(lambda: changes.append(1))
        (first, second), (client, _) = bench.servers, bench.clients
        client.raise_always(EngineDeadError("dead"))
        bench.backend.health.record(EngineDeadError("many\nlines " + 300 * "x"), target("a"))
        dead = first.dead["m"]
        assert dead.reason == "many lines " + 289 * "x"
        assert bench.backend.dead_engines() == {"m": {"a": dead}}
        assert second.dead == {}
        await asyncio.sleep(1)
        assert (len(changes), bench.registry.refreshes) == (1, 1)
        second.dead["m"] = second.dead["n"] = dead
        found = bench.backend.dead_engines()
        assert found == {"m": {"a": first.dead["m"], "b": dead}, "n": {"b": dead}}
        assert bench.backend.health._refreshes == set()

        async def answer(on_delta: OnDelta) -> None:
            on_delta(delta())

        client.answer = answer
        while not bench.backend.health.allows(target("a")):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        assert first.dead == {}
        assert len(changes) == 2
        await bench.backend.close()
        assert bench.registry.refreshes == 2

    run_in_virtual_time(work())


def test_an_engine_of_a_removed_server_changes_nothing() -> None:
    async def work() -> None:
        bench, changes = Bench(1), list[int]()
        bench.backend.health.on_change(lambda: changes.append(1))
        bench.backend.health.record(EngineDeadError("dead"), target("b"))
        await asyncio.sleep(1)
        assert (changes, bench.registry.refreshes) == ([], 0)
        await bench.backend.close()

    run_in_virtual_time(work())


@pytest.mark.parametrize("error", [StreamLostError("cut"), NotTakenError("away")])
def test_a_lost_target_pauses_only_where_another_server_has_the_model(
    error: GenerationError,
) -> None:
    """Otherwise the results would wait for nothing."""

    async def work() -> None:
        bench = Bench(1, 1)
        bench.serve("m", "n", on=bench.servers[:1])
        bench.backend.health.record(error, target("a", "m"))
        bench.backend.health.record(error, target("a", "n"))
        bench.backend.health.record(ModelFailedError("its own"), target("b"))
        await asyncio.sleep(0.5)
        trusted = [target("b"), target("a", "n"), target("a", "m")]
        assert [bench.backend.health.allows(one) for one in trusted] == [True, True, False]
        await asyncio.sleep(1)
        assert bench.backend.health.allows(target("a"))
        await bench.backend.close()

    run_in_virtual_time(work())


def test_a_report_of_another_worker_is_probed_here() -> None:
    async def work() -> None:
        bench = Bench(1)
        assert bench.pool.on_report is not None
        bench.pool.on_report(bench.servers[0], "m", DeadEngine(datetime.now(UTC), "elsewhere"))
        assert not bench.backend.health.allows(target("a"))
        await bench.backend.health.settled("m")
        assert bench.backend.health.allows(target("a"))
        assert len(bench.clients[0].requests) == 1
        await bench.backend.close()

    run_in_virtual_time(work())
