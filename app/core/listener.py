"""LISTEN connection of a process; it pings itself and reconnects after silence."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from uuid import UUID

import asyncpg

from app.core.database import Database, is_transient
from app.core.waiting import is_set_within

logger = logging.getLogger(__name__)

# Channels. An empty payload means "read the table".
ENQUEUED = "llm_enqueued"  # model names, comma-separated
ENDED = "llm_ended"  # ids (32 hex digits each, comma-separated) of results and jobs that ended
CANCELLED = "llm_cancelled"  # ids of running results whose owner should stop
WATCHED = "llm_watched"  # a process and the ids that it reads: see results/streams/interest.py
APPENDED = "llm_appended"  # ids of running results with new stored text
LIVE_TEXT = "llm_live_text_"  # and the id of a process: text that it reads, see queue/live_text.py
WEBHOOKS = "llm_webhooks"  # always empty: a delivery is due
BATCHES = "llm_batches"  # ids of batches that are new, or to be stopped
LIMITS = "llm_limits"  # always empty: limits of a team have changed
SERVERS = "llm_servers"  # always empty: a Triton server was registered, drained or removed
LAUNCHES = "llm_launches"  # always empty: a launch is new or to be stopped, or a download is new
TOKENS = "llm_tokens"  # always empty: a key or a JWT was revoked

# A silent connection is detected within the sum of both.
_PING_SECONDS = 2.5
_PING_TIMEOUT_SECONDS = 2.5
_RECONNECT_SECONDS = 0.25
_PING = "SELECT 'listening'"  # marks this connection in pg_stat_activity

# A notification holds 8,000 bytes: 240 ids with their commas, so these, and room for a name.
IDS_PER_NOTIFICATION = 200

Handler = Callable[[str], None]


def join_ids(ids: Sequence[UUID]) -> Iterator[str]:
    """Yield payloads that hold the ids, in as few notifications as possible."""
    for start in range(0, len(ids), IDS_PER_NOTIFICATION):
        yield ",".join(identifier.hex for identifier in ids[start : start + IDS_PER_NOTIFICATION])


def split_ids(payload: str) -> list[UUID]:
    return [UUID(hex=digits) for digits in payload.split(",")]


class Listener:
    """Passes notifications to handlers.

    After each (re)connection it calls every handler with an empty payload: notifications may have
    been missed.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._handlers: dict[str, list[Handler]] = {}

    def subscribe(self, channel: str, handler: Handler) -> None:
        self._handlers.setdefault(channel, []).append(handler)

    async def run(self) -> None:
        while True:
            try:
                await self._listen()
            except Exception as error:
                if not is_transient(error):
                    raise
                if isinstance(error, TimeoutError):  # silent: then others may be, too
                    await self._database.renew()
                logger.info(
                    "listener lost its connection: %s", error, extra={"action": "listener_lost"}
                )
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self) -> None:
        connection = await self._database.connect()
        closed = asyncio.Event()
        connection.add_termination_listener(lambda _: closed.set())
        try:
            for channel in self._handlers:
                await connection.add_listener(channel, self._receive)
            for channel in self._handlers:
                self._notify(channel, "")
            while not await is_set_within(closed, _PING_SECONDS):
                await connection.execute(_PING, timeout=_PING_TIMEOUT_SECONDS)
                self._database.check(connection)
            raise ConnectionResetError("closed by the server")
        finally:
            connection.terminate()

    def _receive(
        self,
        _connection: "asyncpg.Connection | asyncpg.pool.PoolConnectionProxy",
        _pid: int,
        channel: str,
        payload: object,
    ) -> None:
        self._notify(channel, str(payload))

    def _notify(self, channel: str, payload: str) -> None:
        for handler in self._handlers[channel]:
            handler(payload)
