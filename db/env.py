"""Alembic's environment: runs migrations over asyncpg with the service's own settings.

Each migration has a transaction of its own, and may leave it for what must run outside of one
(`app.core.schema_changes`). The session's advisory lock covers all of them.
"""

import asyncio
import time
from typing import Any

from alembic import context
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from app.core.migration_engine import make_engine
from app.core.settings import Settings
from app.core.tables import metadata

# Two processes may migrate at the same moment (replicas starting together): one waits.
_MIGRATION_LOCK = 0x4C4C4D  # "LLM"
_LOCK_SECONDS = 3600.0
_PAUSE_SECONDS = 0.2


def _lock(connection: Connection) -> None:
    """Be the only one that migrates, until the connection ends.

    It polls: a waiting statement would hold a snapshot, and a migration that builds an
    index concurrently waits for all snapshots that are older.
    """
    ends = time.monotonic() + _LOCK_SECONDS
    query = f"SELECT pg_try_advisory_lock({_MIGRATION_LOCK})"
    while not connection.exec_driver_sql(query).scalar_one():
        connection.commit()
        if time.monotonic() > ends:
            raise TimeoutError("Another process has been migrating this database for an hour.")
        time.sleep(_PAUSE_SECONDS)
    connection.commit()


def _number(_context: Any, _revision: Any, directives: list[Any]) -> None:
    """Give a new migration the number after the last one, by which the service orders them."""
    last = ScriptDirectory.from_config(context.config).get_current_head()
    for script in directives:
        script.rev_id = f"{int(last or 0) + 1:04}"


def _run(connection: Connection) -> None:
    _lock(connection)
    context.configure(
        process_revision_directives=_number,
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        compare_server_default=True,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def _migrate() -> None:
    engine = make_engine(context.config.attributes.get("settings") or Settings())
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


asyncio.run(_migrate())
