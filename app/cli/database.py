"""Commands that need the database: opens it for them, and reports refusals in one line."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg

from app.cli.arguments import Run
from app.core.database import Database
from app.core.errors import DatabaseUnavailableError, ServiceError
from app.core.program import PROGRAM
from app.core.settings import Settings

S = TypeVar("S")
Command = Callable[[S, argparse.Namespace], Awaitable[int | None]]


def store_command(
    name: str, make: Callable[[Database, Settings], S]
) -> Callable[[Command[S]], Run]:
    """Decorator of commands on the store that `make` opens; `name` is its connection's.

    The exit status is the command's result, 0 for None; 1 with the reason on stderr.
    """

    def decorate(command: Command[S]) -> Run:
        return lambda options: _run(
            name, lambda database, settings: command(make(database, settings), options)
        )

    return decorate


def _run(name: str, work: Callable[[Database, Settings], Awaitable[int | None]]) -> int:
    settings = Settings()

    async def run() -> int:
        async with Database(settings, f"llm {name}") as database:
            return await work(database, settings) or 0

    try:
        return asyncio.run(run())
    except Exception as error:
        if (reason := refusal(error, settings)) is None:
            raise
    sys.stderr.write(f"{reason}\n")
    return 1


def refusal(error: Exception, settings: Settings) -> str | None:
    """Describe in a line why the database cannot be used, and name the setting; None for other errors."""
    if isinstance(error, DatabaseUnavailableError):
        return f"PostgreSQL at {settings.database_host} (LLM_DATABASE_URL) does not answer."
    if isinstance(error, ServiceError):
        return error.detail
    if isinstance(error, asyncpg.UndefinedTableError):
        return f"The database has no such tables yet: run `{PROGRAM} migrate`."
    if isinstance(
        error, (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError)
    ):
        return f"PostgreSQL refused LLM_DATABASE_ADMIN_USER and LLM_DATABASE_PASSWORD: {error}"
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return f"PostgreSQL does not have LLM_DATABASE_DB: {error}"
    if isinstance(error, asyncpg.PostgresError):
        return f"The database refused: {error}"
    return None
