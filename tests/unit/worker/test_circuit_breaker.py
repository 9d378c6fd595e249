"""The circuit breaker alone: what a probe's answer does to a suspect place."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from app.worker.attempt import Target
from app.worker.backends.circuit_breaker import CircuitBreaker, Probe, ProbeOutcome

PLACE: Target = ("host:8001", "m")


class Engine:
    """Answers probes as the test demands; counts them."""

    def __init__(self) -> None:
        self.answer = ProbeOutcome.ANSWERED
        self.probes = 0
        self.changes: list[Target] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.breaker = CircuitBreaker(self.probe, self.changes.append)

    async def probe(self, target: Target) -> Probe:
        assert target == PLACE
        self.probes += 1
        await self.may_answer.wait()
        return Probe(self.answer, "it is ill")


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setattr("app.worker.backends.circuit_breaker._FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("app.worker.backends.circuit_breaker._MAX_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr("app.worker.backends.circuit_breaker._LOSS_PAUSE_SECONDS", 0.02)
    engine = Engine()
    yield engine
    await engine.breaker.close()


async def until_all_wait() -> None:
    """Each task has had its turns: what is left waits for the answer."""
    for _ in range(10):
        await asyncio.sleep(0)


async def closed(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while not engine.breaker.allows(PLACE):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)


async def test_a_suspect_place_gets_nothing_until_a_probe_is_answered(engine: Engine) -> None:
    engine.may_answer.clear()
    assert engine.breaker.allows(PLACE)
    engine.breaker.suspect(PLACE)
    assert not engine.breaker.allows(PLACE)
    assert engine.breaker.dead(PLACE) is None
    settled = asyncio.create_task(engine.breaker.settled(PLACE, 10))
    await until_all_wait()
    assert not settled.done()
    engine.may_answer.set()
    await settled
    assert engine.breaker.allows(PLACE)
    assert engine.probes == 1


async def test_a_failed_probe_opens_the_circuit_and_an_answered_one_closes_it(
    engine: Engine,
) -> None:
    engine.answer = ProbeOutcome.FAILED
    engine.breaker.suspect(PLACE)
    await engine.breaker.settled(PLACE, 10)
    dead = engine.breaker.dead(PLACE)
    assert dead is not None
    assert dead.reason == "it is ill"
    assert not engine.breaker.allows(PLACE)
    assert engine.changes == [PLACE]
    engine.answer = ProbeOutcome.ANSWERED
    await closed(engine)
    assert engine.breaker.dead(PLACE) is None
    assert engine.changes == [PLACE] * 2
    assert engine.probes >= 2


@pytest.mark.parametrize("answer", [ProbeOutcome.SILENT, ProbeOutcome.UNREACHED])
async def test_no_answer_decides_nothing(engine: Engine, answer: ProbeOutcome) -> None:
    engine.answer = answer
    engine.breaker.suspect(PLACE)
    while engine.probes < 3:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.001)
    assert not engine.breaker.allows(PLACE)
    assert engine.breaker.dead(PLACE) is None


async def test_a_removed_server_is_forgotten(engine: Engine) -> None:
    engine.answer = ProbeOutcome.GONE
    engine.breaker.open(PLACE, "dead")
    await closed(engine)


async def test_concurrent_questions_share_a_probe(engine: Engine) -> None:
    engine.may_answer.clear()
    asking = [asyncio.create_task(engine.breaker.ask(PLACE)) for _ in range(5)]
    await until_all_wait()
    engine.may_answer.set()
    assert {(await one).answer for one in asking} == {ProbeOutcome.ANSWERED}
    assert engine.probes == 1


async def test_each_loss_in_a_row_doubles_the_pause_where_there_are_others(engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    pauses = []
    for _ in range(3):
        began = loop.time()
        engine.breaker.suspect(PLACE, is_only=False)
        await closed(engine)
        pauses.append(loop.time() - began)
    assert all(pause >= least for pause, least in zip(pauses, (0.02, 0.04, 0.08), strict=True))
    engine.breaker.succeeded(PLACE)
    assert PLACE not in engine.breaker._losses


async def test_losses_of_one_moment_are_one(engine: Engine) -> None:
    for _ in range(60):
        engine.breaker.suspect(PLACE, is_only=False)
    assert engine.breaker._losses[PLACE] == 1
    await closed(engine)


async def test_an_old_report_is_no_news(engine: Engine) -> None:
    now = datetime.now(UTC)
    engine.breaker.on_report(PLACE, now)
    assert not engine.breaker.allows(PLACE)
    await closed(engine)
    engine.breaker.on_report(PLACE, now)
    assert engine.breaker.allows(PLACE)
    engine.breaker.on_report(PLACE, now + timedelta(minutes=1))
    assert not engine.breaker.allows(PLACE)
    await closed(engine)
