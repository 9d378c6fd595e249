"""Places for work of different weights, first come, first served."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class WeightedPlaces:
    def __init__(self, capacity: int) -> None:
        self._capacity = self._free = capacity
        self._first = asyncio.Lock()  # of those that wait
        self._left = asyncio.Event()

    async def take(self, weight: int) -> int:
        """Wait for the places; returns how many were taken: all of them for heavier work."""
        weight = min(weight, self._capacity)
        async with self._first:
            while self._free < weight:
                self._left.clear()
                await self._left.wait()
            self._free -= weight
        return weight

    def give_back(self, weight: int) -> None:
        self._free += weight
        self._left.set()

    @asynccontextmanager
    async def hold(self, weight: int) -> AsyncIterator[None]:
        taken = await self.take(weight)
        try:
            yield
        finally:
            self.give_back(taken)
