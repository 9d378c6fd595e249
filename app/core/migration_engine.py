"""Connections of migrations: SQLAlchemy serves Alembic alone, the service queries through `database`."""

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from app.core.primary import Primary
from app.core.settings import Settings

# The role may have the service's settings, for its sessions behind a PgBouncer.
_SETTINGS = {
    "lock_timeout": "60s",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "enable_seqscan": "on",
    "plan_cache_mode": "auto",
}


def make_engine(settings: Settings) -> AsyncEngine:
    async def connect(**arguments: object) -> asyncpg.Connection:
        return await Primary(settings.direct_addresses()).connect(
            user=settings.database_user,
            password=settings.database_password.get_secret_value(),
            database=settings.database_name,
            server_settings=_SETTINGS,
            **arguments,
        )

    return create_async_engine("postgresql+asyncpg://", poolclass=NullPool, async_creator=connect)
