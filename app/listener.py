"""One LISTEN connection a process: pings itself, and silence means reconnect and look again."""

import asyncio
import logging
from collections.abc import Callable

import asyncpg

from app.database import Database, is_passing

logger = logging.getLogger(__name__)

# Channels. Payloads carry names and ids, never text; an empty payload means "look".
ENQUEUED = "llm_enqueued"  # model names, comma-separated
ENDED = "llm_ended"  # ids (32 hex digits each, comma-separated) of results that became terminal
CANCELLED = "llm_cancelled"  # ids of running results whose owner should stop
WEBHOOKS = "llm_webhooks"  # always empty: a delivery is due

_PING_SECONDS = 5.0
_PING_TIMEOUT_SECONDS = 5.0
_RECONNECT_SECONDS = 0.25

Handler = Callable[[str], None]


class Listener:
    """Fans notifications out to handlers.

    After each (re)connection every handler is called with an empty payload: what was told while
    nobody listened must be looked up.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._handlers: dict[str, list[Handler]] = {}

    def subscribe(self, channel: str, handler: Handler) -> None:
        """Register a handler; before `run` starts."""
        self._handlers.setdefault(channel, []).append(handler)

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            try:
                await self._listen()
            except Exception as error:
                if not is_passing(error):
                    raise
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
                self._tell(channel, "")
            while not closed.is_set():
                try:
                    await asyncio.wait_for(closed.wait(), _PING_SECONDS)
                except TimeoutError:
                    await connection.execute("SELECT 1", timeout=_PING_TIMEOUT_SECONDS)
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
        self._tell(channel, str(payload))

    def _tell(self, channel: str, payload: str) -> None:
        for handler in self._handlers[channel]:
            handler(payload)
