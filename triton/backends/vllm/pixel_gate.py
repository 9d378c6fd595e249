"""Bound of the pixels that are decoded at the same time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PixelGate:
    """First come, first served: a large image is not passed by small ones."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.free = capacity
        self.first = asyncio.Lock()  # of those that wait
        self.left = asyncio.Event()

    @asynccontextmanager
    async def hold(self, pixels: int) -> AsyncIterator[None]:
        """Wait for room; more pixels than there is room for take all of it."""
        pixels = min(pixels, self.capacity)
        async with self.first:
            while self.free < pixels:
                self.left.clear()
                await self.left.wait()
            self.free -= pixels
        try:
            yield
        finally:
            self.free += pixels
            self.left.set()
