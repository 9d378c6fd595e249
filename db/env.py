"""Alembic's environment: runs migrations over asyncpg with the service's own settings."""

import asyncio

from alembic import context
from sqlalchemy import Connection

from app.settings import Settings
from app.tables import make_engine, metadata

# Two processes may migrate at the same moment (replicas starting together): one waits.
_MIGRATION_LOCK = 0x4C4C4D  # "LLM"


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        context.run_migrations()


async def _migrate() -> None:
    engine = make_engine(context.config.attributes.get("settings") or Settings())
    async with engine.connect() as connection:
        await connection.run_sync(_run)
        await connection.commit()
    await engine.dispose()


asyncio.run(_migrate())
