"""Connections to PostgreSQL: one pool a process, every limit explicit, every wait bounded.

Hot and cold statements alike go through asyncpg; SQLAlchemy serves Alembic alone (db/env.py).
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import asyncpg

from app.core import metrics
from app.core.errors import DatabaseFullError, DatabaseUnavailableError
from app.core.primary import Primary
from app.core.settings import Settings

T = TypeVar("T")
Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

_CLOSE_TIMEOUT = 5.0  # seconds
_FIRST_PAUSE = 0.05  # seconds between tries against a database that is away
_LONGEST_PAUSE = 1.0
# Room does not come back in a moment: who can be told, is told soon. A table that is being extended by
# many at once may find some all the same.
_FULL_SECONDS = 1.0
_FULL_RETRY_AFTER = 30

# The server said that it is down or going down: while that is so, nobody can take a lease away.
SERVER_DOWN = (
    ConnectionRefusedError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)

# What may pass if the same statement is sent again. Statements sent through `Database` and `Batcher`
# are idempotent for that reason: a connection lost at COMMIT leaves the outcome unknown.
_PASSING = (
    *SERVER_DOWN,
    OSError,
    TimeoutError,
    DatabaseUnavailableError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.TooManyConnectionsError,
    asyncpg.QueryCanceledError,
    asyncpg.LockNotAvailableError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    # The statement was undone, and reads go on; it succeeds once somebody has made room.
    asyncpg.DiskFullError,
    # The server was the primary when we connected, or a name led to a standby: another one is, or
    # will be.
    asyncpg.ReadOnlySQLTransactionError,
)


# A record in the log, which nobody reads: its commit waits for all that stand before it.
_AWAIT_STANDBY = """
SELECT pg_logical_emit_message(true, 'llm', '')
WHERE current_setting('synchronous_standby_names') <> ''
"""


def is_transient(error: BaseException) -> bool:
    """Whether the error is the database's state, not the statement's fault."""
    # asyncpg reports an argument it cannot encode as an InterfaceError that is a ValueError too.
    return isinstance(error, _PASSING) and not isinstance(error, ValueError)


class Database:
    """The process's pool, with retries that end: a database that is away is a 503, not a hang."""

    def __init__(self, settings: Settings, application_name: str) -> None:
        self._settings = settings
        self._name = application_name
        self._timeout = settings.database_timeout_seconds
        self._primary = Primary(settings.database_addresses())
        self._pool: asyncpg.Pool | None = None

    async def __aenter__(self) -> "Database":
        self._pool = await asyncpg.create_pool(
            **self._connect_arguments(),
            connect=self._primary.connect,
            min_size=0,  # the service starts, and says so, while the database is away
            max_size=self._settings.database_pool_size,
            max_inactive_connection_lifetime=300,
            # A connection that went silent leaves time to try once more on another.
            command_timeout=self._timeout / 2,
            # Sessions carry no state between borrowers; the default reset costs a round trip.
            reset=_keep,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._pool is not None
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    def _connect_arguments(self) -> dict[str, Any]:
        milliseconds = str(int(self._timeout * 1000))
        return {
            "user": self._settings.database_user,
            "password": self._settings.database_password.get_secret_value(),
            "database": self._settings.database_name,
            "server_settings": {
                "application_name": self._name,
                "jit": "off",
                "statement_timeout": milliseconds,
                "lock_timeout": milliseconds,
                "idle_in_transaction_session_timeout": milliseconds,
                # Every statement has its index. A generic plan made while the table was small
                # must not become a sequential scan of ten million rows.
                "enable_seqscan": "off",
                "plan_cache_mode": "force_generic_plan",
            },
        }

    async def connect(self) -> asyncpg.Connection:
        """A connection of its own, outside the pool: for the listener and the heartbeat."""
        return await self._primary.connect(
            **self._connect_arguments(), command_timeout=self._timeout
        )

    def check(self, connection: asyncpg.Connection) -> None:
        """Raise ConnectionResetError if the server no longer takes writes, and another may."""
        if self._primary.has_left(connection):
            raise ConnectionResetError("the server has become read-only")

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection; one whose statement was cut short is closed, never reused."""
        assert self._pool is not None, "Database is used inside `async with`"
        began = time.perf_counter()
        connection = await self._pool.acquire(timeout=self._timeout)
        metrics.POOL_WAIT.observe(time.perf_counter() - began)
        try:
            yield connection
        except (TimeoutError, asyncio.CancelledError):
            # Without asking the server to cancel: one that waits for its standby would then show
            # what the standby lacks.
            connection.terminate()
            raise
        except asyncpg.ReadOnlySQLTransactionError:
            connection.terminate()
            await self.renew()
            raise
        finally:
            await self._pool.release(connection)

    async def renew(self) -> None:
        """Have every borrower get a new connection: the present ones lead to a silent server, or
        to one that takes no writes.
        """
        assert self._pool is not None, "Database is used inside `async with`"
        await self._pool.expire_connections()

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run an idempotent piece of work, again after a lost connection, for a bounded time.

        Raises `DatabaseUnavailableError` when the database stays away.
        """
        retry = Retry(self._timeout)
        while True:
            try:
                async with self.connection() as connection:
                    return await work(connection)
            except Exception as error:
                if not is_transient(error):
                    raise
                await retry.pause(error)

    async def fetch(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        return await self.run(lambda connection: connection.fetch(query, *arguments))

    async def fetchrow(self, query: str, *arguments: object) -> asyncpg.Record | None:
        return await self.run(lambda connection: connection.fetchrow(query, *arguments))


async def lock_team(connection: Connection, what: str, team_id: str) -> None:
    """Until the transaction ends, be the only one, of all processes, that adds to what a team has."""
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtext($1), hashtext($2))", what, team_id
    )


async def await_standby(connection: Connection) -> None:
    """Return when whatever is committed by now is where commits have to be before they are told.

    A server that comes up again shows all that it had committed itself, also what its synchronous
    standby lacks. Who finds there what it had sent before, and tells it, waits here first.
    """
    await connection.execute(_AWAIT_STANDBY)


class Retry:
    """The pauses between tries: growing, and ended by `DatabaseUnavailableError` after `seconds`.

    A full disk ends them sooner (`DatabaseFullError`), but for who waits for ever: `seconds` infinite.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._ends = self._began + seconds
        self._pause = _FIRST_PAUSE

    async def pause(self, error: BaseException) -> None:
        resumes = self._loop.time() + self._pause
        is_full = isinstance(error, asyncpg.DiskFullError) and math.isfinite(self._ends)
        if is_full and resumes > min(self._ends, self._began + _FULL_SECONDS):
            raise DatabaseFullError(
                "The database's disk is full: nothing of this was stored. What is there can be read; "
                "its operator has to make room. Try again later.",
                headers={"Retry-After": str(_FULL_RETRY_AFTER)},
            ) from error
        if resumes > self._ends:
            raise DatabaseUnavailableError(
                "The database did not answer in time; nothing is known to be stored. Try again.",
                headers={"Retry-After": "2"},
            ) from error
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)


async def _keep(_: Connection) -> None:
    """No reset between borrowers."""
