"""Waiting for an event, for a time.

Not by asyncio.wait_for: up to Python 3.11 it loses a cancellation that arrives in the very step in
which the event is set (https://github.com/python/cpython/issues/86296), and a task that waits in a
loop then lives on.
"""

import asyncio
import contextlib


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, at most `seconds`; whether it is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def is_set_by(event: asyncio.Event, ends: float) -> bool:
    """The same, until a time of the loop's clock."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(ends):
            await event.wait()
    return event.is_set()
