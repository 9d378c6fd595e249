"""Interest of other processes in results: a worker notifies the processes that stream them.

A process that streams results announces their ids on the channel WATCHED, again every
ANNOUNCE_SECONDS while it streams them, and at once when a worker asks. Workers remember the ids, also
of results that they have not claimed yet, until an announcement is overdue.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from app.core.database import Database
from app.core.errors import DatabaseUnavailableError
from app.core.listener import WATCHED, Listener, join_ids, split_ids

ANNOUNCE_SECONDS = 20.0
_INTEREST_TTL_SECONDS = 3 * ANNOUNCE_SECONDS
_QUESTION = "?"


class StreamInterest:
    """The ids that readers elsewhere have announced; `on_announced` is called with new ones."""

    def __init__(
        self,
        database: Database,
        listener: Listener,
        own: UUID,
        on_announced: Callable[[Iterable[UUID]], None],
    ) -> None:
        self._database = database
        self._own = own.hex  # readers of this process are notified directly
        self._on_announced = on_announced
        self._forget_at: dict[UUID, dict[str, float]] = {}  # by result and reader
        self._asking: asyncio.Task[object] | None = None
        listener.subscribe(WATCHED, self._on_notification)

    def readers(self, result_id: UUID) -> list[str]:
        """Return the ids, as hex digits, of the processes that read a result."""
        now = asyncio.get_running_loop().time()
        times = self._forget_at.get(result_id, {})
        return [reader for reader, forget_at in times.items() if forget_at > now]

    def _on_notification(self, payload: str) -> None:
        if not payload:  # (re)connected: earlier announcements are lost
            self._asking = asyncio.create_task(self._ask_readers())
        elif payload != _QUESTION:
            reader, ids = read_announcement(payload)
            if reader != self._own:
                self._remember(reader, ids)

    async def _ask_readers(self) -> None:
        """Ask every process for an announcement; if that fails, the periodic ones suffice."""
        with contextlib.suppress(DatabaseUnavailableError):
            await self._database.fetch("SELECT pg_notify($1, $2)", WATCHED, _QUESTION)

    def _remember(self, reader: str, ids: Sequence[UUID]) -> None:
        now = asyncio.get_running_loop().time()
        self._forget_at = {
            identifier: times
            for identifier, times in self._forget_at.items()
            if max(times.values()) > now
        }
        for identifier in ids:
            self._forget_at.setdefault(identifier, {})[reader] = now + _INTEREST_TTL_SECONDS
        self._on_announced(ids)


async def announce(database: Database, reader: UUID, ids: Sequence[UUID]) -> None:
    payloads = [f"{reader.hex} {part}" for part in join_ids(ids)]
    await database.fetch("SELECT pg_notify($1, p) FROM unnest($2::text[]) p", WATCHED, payloads)


def is_question(payload: str) -> bool:
    return payload == _QUESTION


def read_announcement(payload: str) -> tuple[str, list[UUID]]:
    reader, _, ids = payload.partition(" ")
    return reader, split_ids(ids)
