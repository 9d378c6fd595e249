"""Bounds of work on threads: its place in the queue, its CPU time, and its time on a busy machine.

The work of these tests waits for events in its thread. Each bound is far below the time that the work
would otherwise take.
"""

import asyncio
import threading
import time

import pytest

from app.inference import bounded_threads
from app.inference.bounded_threads import BoundedThreads, ThreadsBusyError

_LONG = 30.0  # seconds; no test takes as long


def use_cpu(seconds: float) -> float:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass
    return ends


async def test_work_returns_its_value_or_its_error() -> None:
    threads = BoundedThreads("test", 1)
    assert await threads.run(lambda: 7, seconds=_LONG, queue_seconds=_LONG) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, seconds=_LONG, queue_seconds=_LONG)


async def test_work_may_wait_longer_than_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps for longer than one look at its clock."""
    monkeypatch.setattr(bounded_threads, "_MAX_STRETCH", 1000)
    threads = BoundedThreads("test", 1)

    def sleep() -> str:
        time.sleep(0.2)  # it uses no CPU time, which is what is bounded
        return "done"

    assert await threads.run(sleep, seconds=0.06, queue_seconds=_LONG) == "done"


async def test_cpu_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_threads, "_MAX_STRETCH", 1000)
    release = threading.Event()

    def spin() -> None:
        while not release.is_set():
            pass

    try:
        with pytest.raises(TimeoutError):
            await BoundedThreads("test", 1).run(spin, seconds=0.06, queue_seconds=_LONG)
    finally:
        release.set()


async def test_work_that_gets_no_cpu_time_ends_by_the_clock() -> None:
    """A thread's earlier work does not count against the bound of the next."""
    threads, release = BoundedThreads("test", 1), threading.Event()
    await threads.run(lambda: use_cpu(0.1), seconds=_LONG, queue_seconds=_LONG)
    try:
        with pytest.raises(ThreadsBusyError, match="the machine is overloaded"):
            await threads.run(lambda: release.wait(_LONG), seconds=0.06, queue_seconds=_LONG)
    finally:
        release.set()


async def test_work_that_does_not_start_in_time_leaves_the_queue() -> None:
    threads, began = BoundedThreads("test", 1), list[str]()
    runs, release = threading.Event(), threading.Event()

    def wait() -> bool:
        runs.set()
        return release.wait(_LONG)

    first = asyncio.create_task(threads.run(wait, seconds=_LONG, queue_seconds=_LONG))
    try:
        assert await asyncio.to_thread(runs.wait, _LONG)
        with pytest.raises(ThreadsBusyError, match="no thread is free"):
            await threads.run(lambda: began.append("x"), seconds=_LONG, queue_seconds=0.05)
        await asyncio.sleep(0)  # the loop withdraws the work in its next step
    finally:
        release.set()
    assert await first
    await threads.run(lambda: None, seconds=_LONG, queue_seconds=_LONG)
    assert began == []
