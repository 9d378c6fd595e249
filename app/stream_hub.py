"""Waiting for results: one LISTEN connection per process, any number of waiters.

Subscribe first, then read the table, then wait: no transition falls between.
"""

import asyncio
from uuid import UUID

import asyncpg

from app.errors import TooManyWaitersError
from app.listener import ENDED, Listener
from app.results import ResultStore


class StreamHub:
    """Wakes those who wait for a result when it becomes terminal, wherever it ended."""

    def __init__(self, results: ResultStore, listener: Listener, max_waiters: int) -> None:
        self._results = results
        self._max_waiters = max_waiters
        self._waiting: dict[UUID, set[asyncio.Event]] = {}
        self._count = 0
        listener.subscribe(ENDED, self._on_ended)

    @property
    def is_full(self) -> bool:
        """Whether a further waiter would be refused."""
        return self._count >= self._max_waiters

    async def wait_terminal(self, team_id: str, result_id: UUID, seconds: float) -> asyncpg.Record:
        """The result once it is terminal, or as it stands after `seconds`.

        Raises NotFoundError, and TooManyWaitersError beyond the process's limit.
        """
        if seconds <= 0:
            return await self._results.get(team_id, result_id)
        if self.is_full:
            raise TooManyWaitersError(
                f"{self._count} requests are waiting already (LLM_MAX_WAITERS). Poll instead.",
                headers={"Retry-After": "5"},
            )
        event = asyncio.Event()
        self._waiting.setdefault(result_id, set()).add(event)
        self._count += 1
        try:
            return await self._wait(team_id, result_id, event, seconds)
        finally:
            self._count -= 1
            waiters = self._waiting[result_id]
            waiters.discard(event)
            if not waiters:
                del self._waiting[result_id]

    async def _wait(
        self, team_id: str, result_id: UUID, event: asyncio.Event, seconds: float
    ) -> asyncpg.Record:
        ends = asyncio.get_running_loop().time() + seconds
        while True:
            event.clear()
            row = await self._results.get(team_id, result_id)
            remaining = ends - asyncio.get_running_loop().time()
            if row["state"] != "pending" or remaining <= 0:
                return row
            try:
                async with asyncio.timeout(remaining):
                    await event.wait()
            except TimeoutError:
                return await self._results.get(team_id, result_id)

    def _on_ended(self, payload: str) -> None:
        if payload:
            ended = [UUID(hex=digits) for digits in payload.split(",")]
        else:  # (re)connected: whatever ended meanwhile was told to nobody
            ended = list(self._waiting)
        for result_id in ended:
            for event in self._waiting.get(result_id, ()):
                event.set()
