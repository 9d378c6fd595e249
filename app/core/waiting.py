"""Bounded waits for an event, and the cancellation of tasks.

asyncio.wait_for up to Python 3.11 loses a cancellation that arrives in the same step as the event
(https://github.com/python/cpython/issues/86296), so a task that waits in a loop would survive it.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any


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


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait until they have ended, however they end."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
