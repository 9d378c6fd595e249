"""A worker's lease: the id it lives under, renewed by heartbeat, fenced by its own clock."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from app.core.database import Connection, Database, is_transient
from app.core.ids import new_id
from app.core.primary import SERVER_DOWN
from app.core.waiting import is_set_within
from app.queue.rescue import session_name

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 5
_FENCE_SHARE = 2 / 3  # of the lease: until then no other worker can have taken the results

_REGISTER = """
INSERT INTO workers (id, host, pid, lease_expires_at)
VALUES ($1, $2, $3, now() + make_interval(secs => $4)) ON CONFLICT (id) DO NOTHING
"""

_RENEW = """
UPDATE workers SET lease_expires_at = now() + make_interval(secs => $2), load = $3::jsonb,
  servers = $4::jsonb
WHERE id = $1 AND dead_at IS NULL
-- It waits for no standby: results run on while that is unreachable. Nothing hangs on a renewal that is
-- lost with its server, for on the next one leases are not judged before a full lease.
RETURNING set_config('synchronous_commit', 'local', true) <> ''
"""


@dataclass(slots=True, frozen=True)
class Load:
    """The load of a worker in its heartbeat, as JSON: by model, and by Triton server."""

    models: str
    servers: str


class FencedError(Exception):
    """This worker's id may have been declared dead: nothing may be written under it."""


class Lease:
    """One id of a worker, from its registration to its end; a new life takes a new Lease."""

    def __init__(self, database: Database, seconds: float) -> None:
        self.id: UUID = new_id()
        self.period = seconds / _RENEWALS_PER_LEASE  # seconds between renewals
        self._database = database
        self._seconds = seconds
        self._renewed_at = time.monotonic()
        self._hurry = asyncio.Event()

    async def register(self) -> None:
        self._renewed_at = time.monotonic()
        await self._database.fetch(
            _REGISTER, self.id, socket.gethostname(), os.getpid(), self._seconds
        )

    def hurry(self) -> None:
        self._hurry.set()

    async def keep(
        self, load: Callable[[float], Load], on_beat: Callable[[Connection], Awaitable[None]]
    ) -> None:
        """Renew on a connection of its own until cancelled, and call `on_beat` with it each time.

        `load` takes the seconds between two renewals. Raises FencedError if declared dead.
        """
        connection: asyncpg.Connection | None = None
        try:
            while True:
                asked_at = time.monotonic()
                try:
                    if connection is None or connection.is_closed():
                        connection = await self._database.connect(session_name(self.id))
                    await self._renew(connection, asked_at, load(self.period))
                    await on_beat(connection)
                except Exception as error:
                    if not is_transient(error):
                        raise
                    if isinstance(error, SERVER_DOWN):
                        # A server that reports itself down gives our results to no worker, and rescuers
                        # wait a full lease after it came up: the fence counts from here.
                        self._renewed_at = asked_at
                    _drop(connection)
                    connection = None
                    extra = {"action": "no_renewal", "worker_id": str(self.id)}
                    logger.info("no renewal: %s", error, extra=extra)
                self._hurry.clear()
                pause = self.period if connection else min(self.period, 0.5)
                await is_set_within(self._hurry, pause)
        finally:
            _drop(connection)

    async def watch_fence(self) -> None:
        fence_seconds = self._seconds * _FENCE_SHARE
        # A renewal moves the end while this sleeps; an event would have to be reset each time.
        while (remaining := self._renewed_at + fence_seconds - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(remaining)
        raise FencedError(f"no renewal for {fence_seconds:.1f} s")

    async def _renew(self, connection: asyncpg.Connection, asked_at: float, load: Load) -> None:
        alive = await connection.fetchval(
            _RENEW, self.id, self._seconds, load.models, load.servers, timeout=self.period * 2
        )
        if not alive:
            raise FencedError("declared dead by another process")
        self._renewed_at = asked_at


def _drop(connection: asyncpg.Connection | None) -> None:
    if connection is not None:
        connection.terminate()
