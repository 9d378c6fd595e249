"""Work on texts of models and users: inline while they are short, else in a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from app.core.background_threads import background_threads

_Value = TypeVar("_Value")

MAX_INLINE_CHARACTERS = 8_000  # about a millisecond of the slowest parser
_THREADS = background_threads("texts", 2)


async def off_loop(characters: int, work: Callable[[], _Value]) -> _Value:
    """The value of `work`, whose time grows with this number of characters."""
    if characters <= MAX_INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
