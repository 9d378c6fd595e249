"""Comparison of the database's schema revision with the one that this version needs."""

import asyncio
import re

import asyncpg

from app.core.database import Connection, Database, is_transient
from app.core.errors import SchemaMismatchError
from app.core.program import PROGRAM, ROOT

_VERSIONS = ROOT / "db" / "versions"
_FILE = re.compile(r"(\d{4})_\w+\.py")
_RETRY_SECONDS = 1.0


def revisions() -> list[str]:
    """Return the revisions of this version, oldest first: the numbers in db/versions."""
    names = (_FILE.fullmatch(path.name) for path in _VERSIONS.iterdir())
    return sorted(name[1] for name in names if name)


def expected() -> str:
    """Return the revision of this version: the newest."""
    return revisions()[-1]


async def read(database: Database | Connection) -> str | None:
    try:
        row = await database.fetchrow("SELECT version_num FROM alembic_version")
    except asyncpg.UndefinedTableError:
        return None
    return None if row is None else str(row["version_num"])


def fault(found: str | None) -> str | None:
    """Describe the fault of a revision and the command that repairs it; None if it fits."""
    known = expected()
    if found == known:
        return None
    if found is None:
        return f"The database has no schema: run `{PROGRAM} migrate`."
    if found < known:
        return (
            f"The database's schema is at {found}, this version needs {known}: run "
            f"`{PROGRAM} migrate`."
        )
    return (
        f"The database's schema is at {found}, this version knows {known}: start the version of the "
        f"service that migrated it, or have that one go back (`{PROGRAM} migrate --to {known}`)."
    )


async def require(database: Database) -> None:
    await database.require_sessions()
    if reason := fault(await read(database)):
        raise SchemaMismatchError(reason)


async def guard(database: Database) -> None:
    """Raise SchemaMismatchError if the schema does not fit, once the database answers.

    It checks once: a process may continue while a newer version migrates the database.
    """
    while True:
        try:
            await require(database)
            break
        except SchemaMismatchError:
            raise
        except Exception as error:
            if not is_transient(error):
                raise
            await asyncio.sleep(_RETRY_SECONDS)
    await asyncio.get_running_loop().create_future()  # an ended task would end its process
