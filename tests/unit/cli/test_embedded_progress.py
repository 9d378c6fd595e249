"""Progress on the terminal, or in a log, while parts start."""

import asyncio
import io

import pytest

from app.cli.up import progress as module
from app.cli.up.progress import Progress, Step


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "REDRAW_SECONDS", 0.005)
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


async def until(stream: io.StringIO, text: str) -> None:
    async with asyncio.timeout(30):
        while text not in stream.getvalue():  # noqa: ASYNC110 - a stream has no event
            await asyncio.sleep(0.005)


async def test_a_terminal_shows_steps_as_one_moving_line() -> None:
    terminal = Terminal()
    async with Progress(terminal) as progress:
        async with progress.step("Triton") as triton, progress.step("API"):
            triton.report("loading demo")
            await until(terminal, "Triton: loading demo 0 s · API 0 s")
        progress.line("done")
    shown = terminal.getvalue()
    assert "\r\x1b[K" in shown
    permanent = [line.rpartition("\x1b[K")[2] for line in shown.split("\n")]
    assert permanent == ["  API ready (0.0 s)", "  Triton ready (0.0 s)", "done", ""]


async def test_a_long_line_is_cut_to_one() -> None:
    terminal = Terminal()
    async with Progress(terminal) as progress, progress.step("x" * 300):
        await until(terminal, "xxx")
    assert max(map(len, terminal.getvalue().split("\r")[:-1])) < 80


async def test_a_log_lists_slow_steps_only(clock: Clock) -> None:
    log = io.StringIO()
    async with Progress(log) as progress:
        async with progress.step("Quick", done="done"):
            pass
        assert log.getvalue() == "  Quick done (0.0 s)\n"
        async with progress.step("Slow") as slow:
            slow.report("thinking")
            clock.now += module.QUIET_SECONDS
            await until(log, "  Slow: thinking 2 s\n")
    assert "\x1b" not in log.getvalue()


async def test_a_step_that_fails_is_not_called_ready() -> None:
    log = io.StringIO()
    async with Progress(log) as progress:
        with pytest.raises(RuntimeError):
            async with progress.step("Doomed"):
                raise RuntimeError
    assert log.getvalue() == ""


def test_a_step_shows_its_name_without_a_detail() -> None:
    assert str(Step("API")) == "API 0 s"
