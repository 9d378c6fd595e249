"""Checks of a PgBouncer between the service and PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg

from app.cli.doctor.findings import Finding, fail, ok, warn
from app.core import pooler
from app.core.database import Database
from app.core.errors import DatabaseUnavailableError
from app.core.settings import Settings

_CHANNEL = "llm_doctor"
_NOTICE_SECONDS = 2.0


async def check_pooler(
    connection: asyncpg.Connection, settings: Settings
) -> AsyncIterator[Finding]:
    """Check LLM_DATABASE_URL; `connection` is one to LLM_DATABASE_LISTENER_URL."""
    if not settings.has_pooler:
        return
    try:
        async with Database(settings, "llm doctor") as database:
            yield await _sessions(database)
            yield await _notifications(connection, database)
            yield _statements(database)
    except (DatabaseUnavailableError, asyncpg.PostgresError) as error:
        reason = str(error.__cause__ or error)
        to_do = "Start PgBouncer, or correct LLM_DATABASE_URL."
        yield fail("pgbouncer", f"{settings.database_host}: {reason}", to_do)


async def _sessions(database: Database) -> Finding:
    try:
        await database.require_sessions()
    except pooler.PoolerError as error:
        found, _, to_do = str(error).partition(": ")
        return fail("pgbouncer", found, to_do)
    return ok("pgbouncer", "its sessions have the service's settings")


async def _notifications(connection: asyncpg.Connection, database: Database) -> Finding:
    """Send a notification through PgBouncer to the listener's server."""
    arrived = asyncio.Event()
    await connection.add_listener(_CHANNEL, lambda *_: arrived.set())
    await database.fetch("SELECT pg_notify($1, '')", _CHANNEL)
    try:
        async with asyncio.timeout(_NOTICE_SECONDS):
            await arrived.wait()
    except TimeoutError:
        found = "a notification sent through it does not reach LLM_DATABASE_LISTENER_URL"
        return fail(
            "pgbouncer", found, "Name the server and the database that PgBouncer connects to."
        )
    finally:
        await connection.reset()
    return ok("pgbouncer", "notifications reach the listeners")


def _statements(database: Database) -> Finding:
    if database.keeps_statements:
        return ok("pgbouncer", "it keeps prepared statements")
    to_do = (
        "PostgreSQL parses and plans each statement again: use PgBouncer 1.21 or newer with "
        "max_prepared_statements above 0, and restart the service."
    )
    return warn("pgbouncer", "it keeps no prepared statements", to_do)
