"""State machines whose examples do not end, or fail: the test ends in any case, and names the place."""

import asyncio
import re
import signal
import threading
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests import machines
from tests.machines import ExampleWatch, StuckError, check_machine

_STUCK_SECONDS = 0.3


def spin() -> None:
    while True:
        pass


def spin_in_a_task() -> None:
    async def work() -> None:
        while True:
            async with asyncio.timeout(60):
                await nothing()

    async def nothing() -> None:
        pass

    asyncio.run(work())


def wait_for_nothing() -> None:
    async def work() -> None:
        await nothing()

    async def nothing() -> None:
        await asyncio.Event().wait()

    asyncio.run(work())


def machine_of(
    act: Callable[[], None], end: Callable[[], None] = lambda: None
) -> Callable[[], RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        @rule()
        def act(self) -> None:
            act()

        def teardown(self) -> None:
            end()

    return Machine


def check(machine: Callable[[], RuleBasedStateMachine], *, stuck_seconds: float = 60.0) -> None:
    check_machine(machine, examples=3, steps=3, stuck_seconds=stuck_seconds)


# The interruption may come between the making of a coroutine and its first step.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", [spin, spin_in_a_task, wait_for_nothing])
def test_an_example_that_does_not_end_is_a_failure(act: Callable[[], None]) -> None:
    with pytest.raises(StuckError, match="an example has not ended") as caught:
        check(machine_of(act), stuck_seconds=_STUCK_SECONDS)
    if act is wait_for_nothing:
        assert re.search(
            r"test_machines.py:\d+ work > .*:\d+ nothing > locks.py", str(caught.value)
        )
    else:
        assert {one.name for one in caught.traceback} & {"spin", "work"}


def test_so_is_one_whose_teardown_does_not_end_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_AGAIN_SECONDS", _STUCK_SECONDS)
    with pytest.raises(StuckError):
        check(machine_of(spin, spin), stuck_seconds=_STUCK_SECONDS)


def test_each_example_has_the_time_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts: list[float] = []
    restart = ExampleWatch.restart

    def count(watch: ExampleWatch) -> None:
        restart(watch)
        restarts.append(watch._ends)

    monkeypatch.setattr(ExampleWatch, "restart", count)
    ended: list[float] = []
    check(machine_of(lambda: None, lambda: ended.append(restarts[-1])))
    assert ended == restarts[1:] == sorted({*ended})


def test_nothing_is_interrupted_afterwards() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    threads = {*threading.enumerate()}  # those of earlier tests may end meanwhile
    check(machine_of(lambda: None))
    assert signal.getsignal(signal.SIGUSR1) == before
    assert {*threading.enumerate()} <= threads


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_shrinking_has_a_bound(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(machines, "_SHRINK_SECONDS", seconds)
    failures: list[int] = []

    class Machine(RuleBasedStateMachine):
        @rule(numbers=st.lists(st.integers(0, 10_000)))
        def act(self, numbers: list[int]) -> None:
            if sum(numbers) > 1_000:
                failures.append(sum(numbers))
                raise AssertionError("a fault")

    with pytest.raises(AssertionError, match="a fault"):
        check_machine(Machine, examples=100, steps=3)
    assert (failures[-1] == 1_001) == (len(failures) > 5) == (seconds > 0)
