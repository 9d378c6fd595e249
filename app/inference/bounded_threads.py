"""Threads for work on foreign input: bounded time in the queue, bounded CPU time of each piece."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from app.core.background_threads import background_threads
from app.core.waiting import is_set_within

_Value = TypeVar("_Value")

_MAX_STRETCH = 4  # wall time of a piece that shares its core, in multiples of its CPU time
_SHORTEST_WAIT = 0.05  # seconds


class ThreadsBusyError(Exception):
    """No thread became free in time, or the machine gave the work too little CPU time."""


class BoundedThreads:
    def __init__(self, name: str, threads: int) -> None:
        self._pool = background_threads(name, threads)

    async def run(
        self, work: Callable[[], _Value], *, seconds: float, queue_seconds: float
    ) -> _Value:
        """The value of `work`, which may use `seconds` of CPU time from its start.

        Raises ThreadsBusyError if it did not start within `queue_seconds`, and TimeoutError once its CPU
        time is used up; its thread is then occupied until the work ends by itself.
        """
        loop = asyncio.get_running_loop()
        started = asyncio.Event()
        clock = began = 0

        def run() -> _Value:
            nonlocal clock, began
            clock = time.pthread_getcpuclockid(threading.get_ident())
            began = time.clock_gettime_ns(clock)
            loop.call_soon_threadsafe(started.set)
            return work()

        running = loop.run_in_executor(self._pool, run)
        try:
            if not await is_set_within(started, queue_seconds):
                raise ThreadsBusyError("no thread is free")
            ends = loop.time() + _MAX_STRETCH * seconds
            left = seconds
            while not running.done():
                await asyncio.wait({running}, timeout=max(left, _SHORTEST_WAIT))
                left = seconds - (time.clock_gettime_ns(clock) - began) / 1e9
                if left <= 0 and not running.done():
                    raise TimeoutError
                if loop.time() > ends and not running.done():
                    raise ThreadsBusyError("the machine is overloaded")
            return running.result()
        finally:
            running.cancel()  # before its start, it leaves the queue
