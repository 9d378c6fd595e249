"""Bounded waits for an event.

asyncio.wait_for up to Python 3.11 loses a cancellation that arrives in the same step as the event
(https://github.com/python/cpython/issues/86296), so a task that waits in a loop would survive it.
"""

import asyncio
import contextlib


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event for at most `seconds`; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def is_set_by(event: asyncio.Event, ends: float) -> bool:
    """Wait for the event until a time of the loop's clock; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(ends):
            await event.wait()
    return event.is_set()
