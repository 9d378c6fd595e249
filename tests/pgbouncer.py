"""A real PgBouncer that pools transactions before the PostgreSQL of a test."""

from pathlib import Path

import asyncpg
import pytest

from app.core.settings import Settings
from bench import pgbouncer
from tests.postgres import PostgresServer

HOST = "127.0.0.1"
CONNECTIONS = 6  # to PostgreSQL: fewer than the pools of two processes


class PgBouncer(pgbouncer.PgBouncer):
    """A PgBouncer that can be killed and directed to another server; skips the test where there is none."""

    def __init__(self, directory: Path, server: PostgresServer, host: str = HOST) -> None:
        program = pgbouncer.binary()
        if program is None:
            pytest.skip("needs pgbouncer")
        super().__init__(program, directory, server, host, CONNECTIONS)

    async def direct(self, server: PostgresServer) -> None:
        """Send all further transactions to another server with the same password."""
        self._write(server)
        await self.console(server, "RELOAD")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    async def console(self, server: PostgresServer, command: str) -> None:
        """Run a command of the console."""
        connection = await asyncpg.connect(
            host=self._host,
            port=self.port,
            user=server.user,
            password=server.password,
            database="pgbouncer",
            statement_cache_size=0,
        )
        try:
            await connection.execute(command)
        finally:
            await connection.close()


async def set_role(server: PostgresServer, settings: Settings) -> None:
    """Give the role its settings."""
    for statement in pgbouncer.role_settings(settings):
        await server.execute(statement)
