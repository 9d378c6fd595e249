"""Which of several PostgreSQL servers takes writes: the others are standbys of it, or down."""

from collections.abc import Sequence
from typing import Any

import asyncpg

_CONNECT_SECONDS = 5.0  # for all servers together

# The server has nothing that takes writes, and says so. Others may have.
_DOWN_OR_STANDBY = (
    ConnectionRefusedError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TargetServerAttributeNotMatched,
)


class NoPrimaryError(ConnectionRefusedError):
    """Every server answered: each is down, starting, or a standby."""


class Primary:
    """Connects to the server that takes writes, and asks it first from then on.

    So a former primary that comes back, and was not fenced, gets no more of this process. Each
    server has its share of the time: one on a machine that is silent must not use up the others'.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = list(addresses)

    async def connect(self, *_: Any, **arguments: Any) -> asyncpg.Connection:
        """A connection, with the named arguments of asyncpg; a pool gives it others, all of them None.

        With one address whoever is no standby will do: one that is read-only for a while is still
        good for reads. Raises OSError, TimeoutError and asyncpg's errors; NoPrimaryError only of
        several addresses.
        """
        if len(self._addresses) == 1:
            return await self._ask(self._addresses[0], "primary", **arguments)
        silent: Exception | None = None
        for address in list(self._addresses):
            try:
                connection = await self._ask(address, "read-write", **arguments)
            except _DOWN_OR_STANDBY:
                continue
            except (OSError, asyncpg.PostgresConnectionError) as error:  # it may be alive
                silent = error
            else:
                self._addresses.sort(key=lambda one: one != address)
                return connection
        raise silent or NoPrimaryError("no server of LLM_DATABASE_URL takes writes")

    def has_left(self, connection: asyncpg.Connection) -> bool:
        """Whether the server of a connection has become read-only, and another may take writes."""
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
            **arguments,
        )
        return connection
