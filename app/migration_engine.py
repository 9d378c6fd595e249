"""How migrations connect: SQLAlchemy serves Alembic alone, the service queries through `database`."""

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from app.settings import Settings


def make_engine(settings: Settings) -> AsyncEngine:
    """An engine without a pool."""
    host, port = settings.database_address()
    url = URL.create(
        "postgresql+asyncpg",
        username=settings.database_user,
        password=settings.database_password.get_secret_value(),
        host=host,
        port=port,
        database=settings.database_name,
    )
    return create_async_engine(
        url, poolclass=NullPool, connect_args={"server_settings": {"lock_timeout": "60s"}}
    )
