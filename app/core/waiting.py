"""Waits for an event, bounded in time, and the cancellation of tasks.

asyncio.wait_for up to Python 3.11 loses a cancellation that arrives in the same step as the event
(https://github.com/python/cpython/issues/86296), so a task that waits in a loop would survive it.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, Protocol


class _Awaitable(Protocol):
    def is_set(self) -> bool: ...

    async def wait(self) -> object: ...


class Signal:
    """An event for one task that waits for it again and again: cheaper than `asyncio.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self.wake()

    def wake(self) -> None:
        """End the present wait, if there is one; a later one waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if self._is_set:
            return
        assert self._waiting is None, "one task waits"
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None


class SilenceTimer:
    """Ends the wait for a signal `seconds` after the last `restart`: one timer of the loop for many restarts.

    It does not set the signal: a task that is busy meanwhile looks at `has_expired` before it waits.
    """

    def __init__(self, signal: Signal, seconds: float) -> None:
        self.has_expired = False  # since the last restart
        self._loop = asyncio.get_running_loop()
        self._signal, self._seconds = signal, seconds
        self._ends = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        self.has_expired = False
        self._ends = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._ends, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._loop.time() < self._ends:
            self._timer = self._loop.call_at(self._ends, self._look)
            return
        self._timer = None
        self.has_expired = True
        self._signal.wake()


async def is_set_within(event: _Awaitable, seconds: float) -> bool:
    """Wait for the event for at most `seconds`; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def is_set_by(event: _Awaitable, ends: float) -> bool:
    """Wait for the event until a time of the loop's clock; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(ends):
            await event.wait()
    return event.is_set()


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait until they have ended, however they end."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
