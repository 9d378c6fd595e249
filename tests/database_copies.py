"""Databases of tests: copies of a migrated template, made ahead and dropped behind the tests' backs.

A copy and its end cost PostgreSQL 30 ms, and a connection 10 ms: a thread of its own waits for them
while tests run.
"""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from tests.postgres import PostgresServer

T = TypeVar("T")


@contextlib.asynccontextmanager
async def own_database(server: PostgresServer, template: str) -> AsyncIterator[str]:
    """The name of a new database, a copy of any other one."""
    name = new_name()
    await server.execute(make_copy(name, template))
    yield name
    await server.execute(drop(name))


def new_name() -> str:
    return f"test_{secrets.token_hex(6)}"


def make_copy(name: str, template: str) -> str:
    """Return the statement. Copied as files, a database writes no log, which would grow to a gigabyte."""
    return f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"


def drop(name: str) -> str:
    """Return the statement; it ends all sessions of the database."""
    return f"DROP DATABASE {name} WITH (FORCE)"


class DatabaseCopies:
    """Copies of a template, each for one test; one is ready when the next test asks."""

    def __init__(self, server: PostgresServer, template: str) -> None:
        self._server = server
        self._template = template
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()  # of the one connection
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="database copies", daemon=True
        )
        self._thread.start()
        self._connection = self._soon(server.connect()).result()
        self._next: Future[str] = self._soon(self._make())
        self._ends: list[Future[None]] = []

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[str]:
        """Yield the name of a database; afterwards its sessions end, and it is dropped in the background."""
        taken, self._next = self._next, self._soon(self._make())
        name = await asyncio.wrap_future(taken)
        yield name
        self._drop_soon(name)

    def _drop_soon(self, name: str) -> None:
        for end in [end for end in self._ends if end.done()]:
            self._ends.remove(end)
            end.result()
        self._ends.append(self._soon(self._execute(drop(name))))

    def close(self) -> None:
        self._drop_soon(self._next.result())
        for end in self._ends:
            end.result()
        self._soon(self._connection.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _soon(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _make(self) -> str:
        name = new_name()
        await self._execute(make_copy(name, self._template))
        return name

    async def _execute(self, statement: str) -> None:
        async with self._turn:
            await self._connection.execute(statement)


@contextlib.contextmanager
def open_copies(server: PostgresServer, template: str) -> Iterator[DatabaseCopies]:
    copies = DatabaseCopies(server, template)
    try:
        yield copies
    finally:
        copies.close()
