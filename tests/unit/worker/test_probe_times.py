"""The times at which the circuit breaker probes a target, by a virtual clock."""

import asyncio
from collections.abc import Sequence

import pytest

from app.worker.attempt import Target
from app.worker.backends.circuit_breaker import CircuitBreaker, Probe, ProbeOutcome
from tests.virtual_time import run_in_virtual_time

PLACE: Target = ("host:8001", "m")
ANSWERED, FAILED = ProbeOutcome.ANSWERED, ProbeOutcome.FAILED


class Probes:
    """Answers probes from a list, the last one again and again; keeps their times."""

    def __init__(self, *answers: ProbeOutcome) -> None:
        self.answers = list(answers)
        self.times: list[float] = []
        self.changes: list[Target] = []
        self.breaker = CircuitBreaker(self.probe, self.changes.append)
        self.began = asyncio.get_running_loop().time()

    async def probe(self, _target: Target) -> Probe:
        self.times.append(asyncio.get_running_loop().time() - self.began)
        return Probe(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0], "ill")

    async def until_closed(self) -> float:
        """Wait for the circuit; the seconds that it was open."""
        began = asyncio.get_running_loop().time()
        while not self.breaker.allows(PLACE):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(2**-7)
        return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("outcome", [FAILED, ProbeOutcome.SILENT, ProbeOutcome.UNREACHED])
def test_the_pause_between_probes_doubles_up_to_five_seconds(outcome: ProbeOutcome) -> None:
    async def work() -> Sequence[float]:
        probes = Probes(outcome)
        probes.breaker.suspect(PLACE)
        await asyncio.sleep(18)
        await probes.breaker.close()
        await asyncio.sleep(60)  # a closed breaker probes no more
        return probes.times

    assert run_in_virtual_time(work()) == [0, 0.25, 0.75, 1.75, 3.75, 7.75, 12.75, 17.75]


def test_a_loss_pauses_a_target_that_answers_twice_as_long_each_time_up_to_a_bound() -> None:
    """The target is probed at the loss and at the end of the pause; a success forgets the losses."""

    async def work() -> tuple[list[float], int]:
        probes, pauses = Probes(ANSWERED), []
        for _ in range(7):
            probes.breaker.suspect(PLACE, is_only=False)
            pauses.append(await probes.until_closed())
        probes.breaker.succeeded(PLACE)
        probes.breaker.suspect(PLACE, is_only=False)
        pauses.append(await probes.until_closed())
        assert probes.breaker._tasks == set()
        return pauses, len(probes.times)

    pauses, count = run_in_virtual_time(work())
    assert [round(pause) for pause in pauses] == [1, 2, 4, 8, 16, 30, 30, 1]
    assert count == 2 * len(pauses)


def test_the_only_target_of_a_model_is_trusted_at_its_first_answer() -> None:
    """Its losses before another server had the model do not count either."""

    async def work() -> float:
        probes = Probes(ANSWERED)
        probes.breaker.suspect(PLACE, is_only=False)
        await probes.until_closed()
        probes.breaker.suspect(PLACE)
        await probes.until_closed()
        probes.breaker.suspect(PLACE, is_only=False)
        return await probes.until_closed()

    assert round(run_in_virtual_time(work())) == 1


def test_a_loss_after_the_pause_prolongs_a_circuit_that_no_probe_closed() -> None:
    async def work() -> tuple[int, float]:
        probes = Probes(FAILED, FAILED, FAILED, ANSWERED)
        probes.breaker.suspect(PLACE, is_only=False)  # until 1 s
        await asyncio.sleep(0.5)
        probes.breaker.suspect(PLACE, is_only=False)  # the same loss
        assert probes.breaker._losses[PLACE] == 1
        await asyncio.sleep(0.75)
        probes.breaker.suspect(PLACE, is_only=False)  # until 3.25 s
        return probes.breaker._losses[PLACE], 1.25 + await probes.until_closed()

    losses, closed_at = run_in_virtual_time(work())
    assert losses == 2
    assert closed_at == pytest.approx(3.25, abs=0.1)


def test_a_dead_engine_is_reported_once_and_keeps_the_time_of_its_death() -> None:
    async def work() -> None:
        probes = Probes(FAILED)
        probes.breaker.open(PLACE, "first")
        first = probes.breaker.dead(PLACE)
        assert first is not None
        await asyncio.sleep(1)
        second = probes.breaker.dead(PLACE)
        assert second is not None
        assert (second.since, second.reason) == (first.since, "ill")
        assert probes.changes == [PLACE]
        await probes.breaker.close()

    run_in_virtual_time(work())


def test_work_waits_for_a_probe_no_longer_than_it_was_asked_to() -> None:
    async def work() -> list[float]:
        loop, waits = asyncio.get_running_loop(), []
        for outcome in (ProbeOutcome.SILENT, FAILED, ANSWERED, ProbeOutcome.GONE):
            probes = Probes(outcome)
            await probes.breaker.settled(PLACE, 3)  # no circuit: no wait
            probes.breaker.suspect(PLACE)
            await probes.breaker.settled(PLACE, 3)
            waits.append(loop.time() - probes.began)
            await probes.breaker.close()
        return waits

    assert run_in_virtual_time(work()) == [3, 0, 0, 0]


def test_later_questions_are_new_probes() -> None:
    async def work() -> int:
        probes = Probes(ANSWERED)
        for _ in range(3):
            await probes.breaker.ask(PLACE)
            await asyncio.sleep(0)  # the end of a probe is noticed
        return len(probes.times)

    assert run_in_virtual_time(work()) == 3
