"""`python -m app migrate`: Alembic's migrations in db/."""

import argparse
import asyncio
import logging
import sys
from argparse import Namespace

from app.cli.database import refusal
from app.core import schema_version
from app.core.database import Database
from app.core.errors import DatabaseUnavailableError
from app.core.program import ROOT
from app.core.settings import Settings

logger = logging.getLogger(__name__)

_HELP = """Brings the database's schema up to date, beside running processes of the former version. With --to
it goes back: for a downgrade, stop API and workers first, and run the newer version's command."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    parser.set_defaults(run=_run)
    text = "revision to bring the schema to, also an older one: %(metavar)s has four digits (the newest)"
    parser.add_argument("--to", metavar="REVISION", help=text)
    text = "go back even where that loses data, such as revocations of JWTs"
    parser.add_argument("--force", action="store_true", help=text)


def _run(options: argparse.Namespace) -> int:
    settings = Settings()
    revisions = schema_version.revisions()
    wanted = options.to or revisions[-1]
    if wanted not in revisions:
        return _fail(f"--to {wanted}: this version has {revisions[0]} to {revisions[-1]}")
    try:
        found = asyncio.run(_read(settings))
    except Exception as error:
        if reason := refusal(error, settings):
            return _fail(reason)
        raise
    if found is not None and found not in revisions:
        return _fail(schema_version.fault(found) or found)
    return _migrate(settings, found, wanted, is_forced=options.force)


async def _read(settings: Settings) -> str | None:
    try:
        connection = await Database(settings, "llm migrate").connect()
    except (OSError, TimeoutError) as error:
        raise DatabaseUnavailableError("The database did not answer.") from error
    try:
        return await schema_version.read(connection)
    finally:
        await connection.close()


def _migrate(settings: Settings, found: str | None, wanted: str, *, is_forced: bool) -> int:
    from alembic import command
    from alembic.config import Config  # here: it logs, when it is imported
    from alembic.util import CommandError

    config = Config(cmd_opts=Namespace(x=["force=yes"] if is_forced else None))
    config.set_main_option("script_location", str(ROOT / "db"))
    config.attributes["settings"] = settings
    is_down = found is not None and wanted < found
    try:
        (command.downgrade if is_down else command.upgrade)(config, wanted)
    except CommandError as error:
        return _fail(str(error))
    logger.info("the database's schema is at %s", wanted)
    return 0


def _fail(reason: str) -> int:
    sys.stderr.write(f"{reason}\n")
    return 1
