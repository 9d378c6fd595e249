"""PgBouncer in front of PostgreSQL: what it takes from a session, and the check of what remains.

In transaction pooling each transaction may run in another session of the server: it holds no LISTEN, no
prepared statement of the client before PgBouncer 1.21, and no setting but those that PgBouncer tracks.
"""

import asyncpg

from app.core.settings import Settings

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

_READ = """
SELECT s.name, current_setting(s.name) AS value, quote_ident(current_user) AS role,
  quote_ident(current_database()) AS database
FROM unnest($1::text[]) s (name)
"""
# PgBouncer from 1.21 on renames prepared statements, and knows them in each of its sessions.
_PROBE = "SELECT name FROM pg_prepared_statements WHERE statement LIKE '% llm_probe' -- llm_probe"
_PROBE_NAME = "llm_probe"
_RENAMED = "PGBOUNCER_"
_REMEDY = (
    "LLM_DATABASE_URL is a PgBouncer: set LLM_DATABASE_LISTENER_URL to PostgreSQL's own address "
    "(docs/scaling.md#connections-and-pgbouncer)."
)
# PgBouncer's answer to a parameter that it neither tracks nor ignores.
_REFUSAL = "unsupported startup parameter"


class PoolerError(Exception):
    """Sessions behind PgBouncer cannot be used as they are; the message names the remedy."""


def session_settings(settings: Settings) -> dict[str, str]:
    """Settings that each session needs, with the values that PostgreSQL shows for them."""
    limit = _milliseconds(settings.database_timeout_seconds)
    return {
        "jit": "off",
        "statement_timeout": limit,
        "lock_timeout": limit,
        "idle_in_transaction_session_timeout": limit,
        # Every statement has its index. A generic plan made while the table was small
        # must not become a sequential scan of ten million rows.
        "enable_seqscan": "off",
        "plan_cache_mode": "force_generic_plan",
    }


async def keeps_statements(connection: asyncpg.Connection) -> bool:
    """Return whether prepared statements outlast a transaction: PgBouncer 1.21, `max_prepared_statements`."""
    try:
        async with connection.transaction():
            statement = await connection.prepare(_PROBE, name=_PROBE_NAME)
            names = [row["name"] for row in await statement.fetch()]
            if any(name.startswith(_RENAMED) for name in names):
                return True
            await connection.execute(
                f"DEALLOCATE {_PROBE_NAME}"
            )  # the session is the next client's
    except asyncpg.DuplicatePreparedStatementError:  # left by another client of the session
        pass
    return False


async def fault(connection: Connection, settings: Settings) -> str | None:
    """Describe what a session behind PgBouncer lacks, and the commands that set it; None if nothing."""
    wanted = session_settings(settings)
    rows = await connection.fetch(_READ, list(wanted))
    missing = [row for row in rows if row["value"] != wanted[row["name"]]]
    if not missing:
        return None
    found = ", ".join(f"{row['name']} is {row['value']}" for row in missing)
    commands = " ".join(
        f"ALTER ROLE {row['role']} IN DATABASE {row['database']} SET {row['name']} = "
        f"'{wanted[row['name']]}';"
        for row in missing
    )
    return (
        f"A session behind PgBouncer lacks settings of the service ({found}): run `{commands}` in "
        "PostgreSQL, then `RECONNECT` in PgBouncer's console."
    )


def refusal(error: BaseException) -> PoolerError | None:
    """Explain the refusal of a PgBouncer that was taken for PostgreSQL; None for other errors."""
    is_refusal = isinstance(error, asyncpg.ProtocolViolationError) and _REFUSAL in str(error)
    return PoolerError(_REMEDY) if is_refusal else None


def _milliseconds(seconds: float) -> str:
    """A duration as PostgreSQL shows it: in the largest unit that gives a whole number."""
    milliseconds = int(seconds * 1000)
    for unit, size in (("min", 60_000), ("s", 1_000)):
        if milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"
