"""Whether the database's schema is the one that this version of the service was written for."""

import asyncio
import re
from pathlib import Path

import asyncpg

from app.core.database import Database, is_transient
from app.core.errors import SchemaMismatchError

_VERSIONS = Path(__file__).resolve().parents[2] / "db" / "versions"
_FILE = re.compile(r"(\d{4})_\w+\.py")
_RETRY_SECONDS = 1.0


def expected() -> str:
    """The revision of this version: the highest number in db/versions."""
    names = (_FILE.fullmatch(path.name) for path in _VERSIONS.iterdir())
    return max(name[1] for name in names if name)


async def read(database: Database) -> str | None:
    """The database's revision; None of one that was never migrated."""
    try:
        row = await database.fetchrow("SELECT version_num FROM alembic_version")
    except asyncpg.UndefinedTableError:
        return None
    return None if row is None else str(row["version_num"])


def fault(found: str | None) -> str | None:
    """What is wrong with a revision, and which command mends it; None if nothing is."""
    known = expected()
    if found == known:
        return None
    if found is None:
        return "The database has no schema: run `python -m app migrate`."
    if found < known:
        return (
            f"The database's schema is at {found}, this version needs {known}: run "
            "`python -m app migrate`."
        )
    return (
        f"The database's schema is at {found}, this version knows {known}: start the version of the "
        f"service that migrated it, or have that one go back (`alembic -c db/alembic.ini downgrade {known}`)."
    )


async def require(database: Database) -> None:
    """Raise SchemaMismatchError unless the schema fits."""
    if reason := fault(await read(database)):
        raise SchemaMismatchError(reason)


async def guard(database: Database) -> None:
    """Raise SchemaMismatchError as soon as the database tells that its schema does not fit.

    Looks once: a process may go on while a newer version migrates what it uses.
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
