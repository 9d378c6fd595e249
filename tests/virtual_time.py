"""An event loop whose clock jumps to the next timer: tests of pauses are exact, and take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_BUSY_STEPS = 10_000  # of the loop without a pause: the code under test spins


class _Selector(selectors.DefaultSelector):
    """Selects at once; `now` passes instead of the time that a caller would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self._busy_steps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._busy_steps = self._busy_steps + 1 if timeout == 0 else 0
        assert self._busy_steps < _MAX_BUSY_STEPS, "a task spins without a pause"
        assert timeout is not None, "nothing is left to wait for"
        found = super().select(0)
        if not found:
            self.now += timeout
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run work that waits for timers alone: neither for threads nor for sockets."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
