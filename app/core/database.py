"""PostgreSQL connections: one asyncpg pool per process, with bounded waits and retries.

SQLAlchemy serves Alembic alone (db/env.py).
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import asyncpg

from app.core import array_types, metrics, pooler
from app.core.errors import DatabaseFullError, DatabaseUnavailableError
from app.core.fair_share import connection_of_team
from app.core.primary import SERVER_DOWN, Primary
from app.core.settings import Settings
from app.core.slow_statements import SlowStatements

T = TypeVar("T")
Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

_CLOSE_TIMEOUT = 5.0  # seconds
_FIRST_PAUSE = 0.05  # seconds between retries while the database is unavailable
_LONGEST_PAUSE = 1.0
# A full disk stays full for longer than a moment, so requests fail soon. A retry still helps where
# other statements extend the same table at the same time.
_FULL_SECONDS = 1.0
_FULL_RETRY_AFTER = 30

# Errors that a retry of the same statement may resolve. Statements sent through `Database` and `Batcher`
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
    # The statement was rolled back; it succeeds once the operator has freed space.
    asyncpg.DiskFullError,
    # The server is a standby, or became one after the connection: another server is the primary.
    asyncpg.ReadOnlySQLTransactionError,
)


# An unused record in the WAL: its commit waits for all earlier records.
_AWAIT_STANDBY = """
SELECT pg_logical_emit_message(true, 'llm', '')
WHERE current_setting('synchronous_standby_names') <> ''
"""


def is_transient(error: BaseException) -> bool:
    # asyncpg reports an argument it cannot encode as an InterfaceError that is a ValueError too.
    is_fault = isinstance(error, ValueError) or pooler.refusal(error) is not None
    return isinstance(error, _PASSING) and not is_fault


def statement_seconds(settings: Settings) -> float:
    """The longest time that a statement may take before its connection is given up."""
    return settings.database_timeout_seconds / 2


class Database:
    """Connection pool of the process; work is retried for a bounded time, then fails with a 503."""

    def __init__(self, settings: Settings, application_name: str) -> None:
        self._settings = settings
        self._name = application_name
        self._timeout = settings.database_timeout_seconds
        self._primary = Primary(settings.database_addresses())
        # A PgBouncer is connected to by the pool alone.
        self._direct = (
            Primary(settings.direct_addresses()) if settings.has_pooler else self._primary
        )
        self._slow = SlowStatements(settings.slow_statement_seconds)
        self.keeps_statements = True  # until a PgBouncer shows that it does not
        self._pool: asyncpg.Pool | None = None

    async def __aenter__(self) -> "Database":
        self._pool = await asyncpg.create_pool(
            **(self._pooler_arguments() if self._settings.has_pooler else self._arguments()),
            connection_class=array_types.Connection,
            connect=self._connect_pooler if self._settings.has_pooler else self._primary.connect,
            init=self._slow.watch,
            min_size=0,  # the service starts, and reports it, while the database is unavailable
            max_size=self._settings.database_pool_size,
            max_inactive_connection_lifetime=300,
            # A connection that went silent leaves time for one retry on another.
            command_timeout=statement_seconds(self._settings),
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

    def _arguments(self, name: str | None = None) -> dict[str, Any]:
        arguments = self._pooler_arguments(name)
        arguments["server_settings"] |= pooler.session_settings(self._settings)
        return arguments

    def _pooler_arguments(self, name: str | None = None) -> dict[str, Any]:
        """Arguments that a PgBouncer accepts: its role has the settings."""
        return {
            "user": self._settings.database_user,
            "password": self._settings.database_password.get_secret_value(),
            "database": self._settings.database_name,
            "server_settings": {"application_name": name or self._name},
        }

    async def _connect_pooler(self, *_: Any, **arguments: Any) -> asyncpg.Connection:
        """Connect to a PgBouncer, with prepared statements where it keeps them."""
        if self.keeps_statements:
            connection = await self._primary.connect(**arguments)
            if await pooler.keeps_statements(connection):
                return connection
            connection.terminate()
            self.keeps_statements = False
        # Unnamed statements stay in one transaction: asyncpg sends no Sync before their execution.
        return await self._primary.connect(**arguments, statement_cache_size=0)

    async def connect(self, name: str | None = None) -> asyncpg.Connection:
        """Open a connection to PostgreSQL outside the pool, for the listener or the heartbeat."""
        return await self._direct.connect(**self._arguments(name), command_timeout=self._timeout)

    async def require_sessions(self) -> None:
        """Raise PoolerError if the sessions behind a PgBouncer lack settings of the service."""
        if self._settings.has_pooler:
            reason = await self.run(lambda connection: pooler.fault(connection, self._settings))
            if reason:
                raise pooler.PoolerError(reason)

    def check(self, connection: asyncpg.Connection) -> None:
        if self._direct.has_left(connection):
            raise ConnectionResetError("the server has become read-only")

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection; it is closed if its statement was interrupted."""
        assert self._pool is not None, "Database is used inside `async with`"
        began = time.perf_counter()
        async with connection_of_team(self._timeout):
            left = max(0.001, self._timeout - (time.perf_counter() - began))
            connection = await self._pool.acquire(timeout=left)
            acquired = time.perf_counter()
            metrics.POOL_WAIT.observe(acquired - began)
            try:
                yield connection
                await self._slow.log_plan(connection, time.perf_counter() - acquired)
            except (TimeoutError, asyncio.CancelledError):
                # No cancel request: a server that waits for its standby would then show what the
                # standby lacks.
                connection.terminate()
                raise
            except asyncpg.ReadOnlySQLTransactionError:
                connection.terminate()
                await self.renew()
                raise
            finally:
                await self._pool.release(connection)

    async def renew(self) -> None:
        """Replace all connections: the server is silent, or no longer accepts writes."""
        assert self._pool is not None, "Database is used inside `async with`"
        await self._pool.expire_connections()

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run idempotent work, and retry it after transient errors for a bounded time.

        Raises `DatabaseUnavailableError` when that time is over.
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
    """Lock one kind of a team's resources against other processes until the transaction ends."""
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtext($1), hashtext($2))", what, team_id
    )


async def await_standby(connection: Connection) -> None:
    """Wait until the synchronous standby, if there is one, has everything committed so far.

    After a restart a primary shows its own commits, also those that its standby lacks. A process that
    finds an earlier statement committed there calls this before it reports the commit.
    """
    await connection.execute(_AWAIT_STANDBY)


class Retry:
    """Growing pauses between retries; after `seconds` they end with `DatabaseUnavailableError`.

    A full disk ends them sooner with `DatabaseFullError`, unless `seconds` is infinite.
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
                "The database's disk is full: nothing of this request was stored. Stored results can "
                "be read; the operator has to free space. Try again later.",
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
    """Leave the session as it is."""
