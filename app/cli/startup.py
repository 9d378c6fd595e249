"""Checks of the settings and the database's schema before a process starts."""

import asyncio
import sys

from app.core.errors import SchemaMismatchError
from app.core.settings import Settings
from app.infini_gram.declarations import read_declarations
from app.provisioning.profiles import read_profiles

_SCHEMA_CHECK_TIMEOUT_SECONDS = 3.0


def read_settings() -> Settings:
    """The settings, with the files that they name: an error now is better than in the middle of a start."""
    settings = Settings()
    read_declarations(settings.indexes_file)
    read_profiles(settings.profiles_file)
    return settings


def schema_fits(settings: Settings) -> bool:
    """Check that the database's schema is this version's; if it is not, report it on stderr.

    If the database is unavailable, the process starts, and checks again later (`container`).
    """
    import asyncpg

    from app.core import schema_version
    from app.core.database import Database, is_transient
    from app.core.pooler import PoolerError, refusal

    async def look() -> None:
        async with (
            asyncio.timeout(_SCHEMA_CHECK_TIMEOUT_SECONDS),
            Database(settings, "llm start") as database,
        ):
            await schema_version.require(database)

    try:
        asyncio.run(look())
    except SchemaMismatchError as error:
        sys.stderr.write(f"{error.detail}\n")
        return False
    except PoolerError as error:
        sys.stderr.write(f"{error}\n")
        return False
    except Exception as error:
        if explained := refusal(error):
            sys.stderr.write(f"{explained}\n")
            return False
        if is_transient(error):
            return True
        if not isinstance(error, asyncpg.PostgresError):
            raise
        sys.stderr.write(f"The database refused: {error} (see LLM_DATABASE_*)\n")
        return False
    return True
