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
    except DatabaseUnavailableError:
        reason = f"PostgreSQL at {settings.database_host} (LLM_DATABASE_URL) does not answer."
    except ServiceError as error:
        reason = error.detail
    except asyncpg.UndefinedTableError:
        reason = f"The database has no such tables yet: run `{PROGRAM} migrate`."
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        reason = f"PostgreSQL refused LLM_DATABASE_ADMIN_USER and LLM_DATABASE_PASSWORD: {error}"
    except asyncpg.InvalidCatalogNameError as error:
        reason = f"PostgreSQL does not have LLM_DATABASE_DB: {error}"
    except asyncpg.PostgresError as error:
        reason = f"The database refused: {error}"
    sys.stderr.write(f"{reason}\n")
    return 1
