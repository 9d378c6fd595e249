"""Selection of the primary among several PostgreSQL servers."""

from collections.abc import Sequence
from typing import Any

import asyncpg

from app.core.array_types import Connection

_CONNECT_SECONDS = 5.0  # for all servers together

# The server reported that it is down or shutting down: no process can take a lease meanwhile.
SERVER_DOWN = (
    ConnectionRefusedError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)


class NoPrimaryError(ConnectionRefusedError):
    """Each server answered that it is down, starting, or a standby."""


class Primary:
    """Connects to the server that accepts writes, and tries it first from then on.

    A former primary that returns without being fenced gets no further connection of this process.
    Each server has its share of the time, so that a silent one does not use up the others'.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = list(addresses)

    async def connect(self, *_: Any, **arguments: Any) -> asyncpg.Connection:
        """Connect with asyncpg's named arguments; the positional ones of a pool are all None.

        With one address any server that is not a standby is accepted, also while it is read-only.
        Raises OSError, TimeoutError and asyncpg's errors; NoPrimaryError only with several addresses.
        """
        if len(self._addresses) == 1:
            return await self._ask(self._addresses[0], "primary", **arguments)
        silent: Exception | None = None
        for address in list(self._addresses):
            try:
                connection = await self._ask(address, "read-write", **arguments)
            except (*SERVER_DOWN, asyncpg.TargetServerAttributeNotMatched):
                continue
            except (OSError, asyncpg.PostgresConnectionError) as error:  # it may be alive
                silent = error
            else:
                self._addresses.sort(key=lambda one: one != address)
                return connection
        raise silent or NoPrimaryError("no server of LLM_DATABASE_URL takes writes")

    def has_left(self, connection: asyncpg.Connection) -> bool:
        """Return whether the connection's server became read-only and another may accept writes."""
        read_only = getattr(connection.get_settings(), "default_transaction_read_only", "off")
        return len(self._addresses) > 1 and read_only == "on"

    async def _ask(
        self, address: tuple[str, int], kind: Any, **arguments: Any
    ) -> asyncpg.Connection:
        host, port = address
        connection: asyncpg.Connection = await asyncpg.connect(
            host=host,
            port=port,
            timeout=_CONNECT_SECONDS / len(self._addresses),
            target_session_attrs=kind,
            **({"connection_class": Connection} | arguments),
        )
        return connection
