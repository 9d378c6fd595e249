"""Waiting for an event or a signal: set, not set, and cancelled in the very step in which it is set."""

import asyncio
import contextlib

import pytest

from app.core.waiting import Signal, SilenceTimer, is_set_by, is_set_within
from tests.virtual_time import run_in_virtual_time

Kind = type[asyncio.Event] | type[Signal]


@pytest.mark.parametrize("kind", [asyncio.Event, Signal])
async def test_tells_whether_it_is_set(kind: Kind) -> None:
    event = kind()
    assert not await is_set_within(event, 0.01)
    assert not await is_set_by(event, asyncio.get_running_loop().time())
    event.set()
    assert await is_set_within(event, 10)


@pytest.mark.parametrize("kind", [asyncio.Event, Signal])
async def test_a_cancellation_is_never_lost(kind: Kind) -> None:
    event = kind()
    task = asyncio.create_task(is_set_within(event, 10))
    await asyncio.sleep(0)
    event.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_signal_wakes_its_task_each_time_it_is_set() -> None:
    signal = Signal()
    for _ in range(3):
        waiting = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        signal.set()
        signal.set()
        await waiting
        await signal.wait()  # as long as it is set
        signal.clear()
        assert not signal.is_set()


async def test_a_cancelled_wait_leaves_the_signal_to_the_next() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    signal.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await is_set_within(signal, 0)


def test_silence_is_counted_from_the_last_restart() -> None:
    run_in_virtual_time(_watch_silence())


async def _watch_silence() -> None:
    loop, signal = asyncio.get_running_loop(), Signal()
    began = loop.time()
    with contextlib.closing(SilenceTimer(signal, 10)) as silence:
        for _ in range(3):
            silence.restart()
            await asyncio.sleep(9)
            assert not silence.has_expired
        silence.restart()
        await signal.wait()
        assert (silence.has_expired, loop.time() - began) == (True, 37)
        assert not await is_set_within(signal, 100), "only after a restart"
        silence.restart()
        assert not silence.has_expired
        await signal.wait()
        assert (silence.has_expired, loop.time() - began) == (True, 147)
        silence.restart()
    assert not await is_set_within(signal, 20)


def test_a_silence_that_ends_while_nothing_waits_sets_no_signal() -> None:
    """It would end the next wait, and the task could not distinguish it from news."""
    run_in_virtual_time(_miss_the_end())


async def _miss_the_end() -> None:
    signal = Signal()
    with contextlib.closing(SilenceTimer(signal, 10)) as silence:
        silence.restart()
        await asyncio.sleep(11)
        assert (silence.has_expired, signal.is_set()) == (True, False)
        silence.restart()
        assert not silence.has_expired
        signal.set()
        await signal.wait()
        assert not silence.has_expired
