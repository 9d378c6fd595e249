"""Restarts, their delays and the order of stopping, with parts that are no processes."""

import asyncio
import io
from collections.abc import Callable

import pytest

from app.cli.up import processes, supervisor as module
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.cli.up.supervisor import Supervisor


class FakePart:
    """A part whose death and whose failures to start the test decides."""

    def __init__(self, name: str, events: list[str], failures: int = 0) -> None:
        self.name = name
        self.events = events
        self.failures = failures
        self.died = asyncio.Event()

    async def start(self, _tell: Callable[[str], None]) -> None:
        self.died.clear()
        if self.failures:
            self.failures -= 1
            self.events.append(f"{self.name} fails")
            raise StartError(f"{self.name} cannot")
        self.events.append(f"{self.name} starts")

    async def wait(self) -> str:
        await self.died.wait()
        return "died"

    async def stop(self) -> None:
        self.events.append(f"{self.name} stops")


@pytest.fixture(autouse=True)
def _no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process has children that are none of the supervisor's."""
    monkeypatch.setattr(processes, "reap_orphans", lambda _grace=0, **_: None)
    monkeypatch.setattr(module, "FIRST_DELAY", 0.001)


async def until(events: list[str], expected: list[str]) -> None:
    async with asyncio.timeout(30):
        while events != expected:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0.001)


async def test_parts_stop_in_reverse_order() -> None:
    events: list[str] = []
    async with Progress(io.StringIO()) as progress:
        supervisor = Supervisor(progress)
        for name in ("a", "b", "c"):
            await supervisor.start(FakePart(name, events))
        events.clear()
        await supervisor.stop()
    assert events == ["c stops", "b stops", "a stops"]


async def test_what_dies_is_started_again_until_it_works() -> None:
    events: list[str] = []
    output = io.StringIO()
    async with Progress(output) as progress:
        supervisor = Supervisor(progress)
        part = FakePart("a", events)
        await supervisor.start(part)
        part.failures = 2
        part.died.set()
        await until(events, ["a starts", "a fails", "a fails", "a starts"])
        await supervisor.stop()
    assert "a died; restarting it" in output.getvalue()
    assert "a cannot" in output.getvalue()
    assert "a is back" in output.getvalue()


async def test_the_first_start_is_not_repeated_and_what_runs_is_stopped() -> None:
    events: list[str] = []
    async with Progress(io.StringIO()) as progress:
        supervisor = Supervisor(progress)
        await supervisor.start(FakePart("a", events))
        with pytest.raises(StartError, match="b cannot"):
            await supervisor.start(FakePart("b", events, failures=1))
        await supervisor.stop()
    assert events == ["a starts", "b fails", "b stops", "a stops"]


async def test_an_error_of_ours_ends_the_wait() -> None:
    class Broken(FakePart):
        async def wait(self) -> str:
            raise ZeroDivisionError

    async with Progress(io.StringIO()) as progress:
        supervisor = Supervisor(progress)
        await supervisor.start(Broken("a", []))
        with pytest.raises(ZeroDivisionError):
            await supervisor.wait()
        await supervisor.stop()
