"""Waiting for an event: set, not set, and cancelled in the very step in which it is set."""

import asyncio

import pytest

from app.core.waiting import is_set_by, is_set_within


async def test_tells_whether_it_is_set() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0.01)
    assert not await is_set_by(event, asyncio.get_running_loop().time())
    event.set()
    assert await is_set_within(event, 10)


async def test_a_cancellation_is_never_lost() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(is_set_within(event, 10))
    await asyncio.sleep(0)
    event.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
