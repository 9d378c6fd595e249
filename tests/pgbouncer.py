"""A real PgBouncer that pools transactions before the PostgreSQL of a test."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from app.cli.up import processes
from app.cli.up.postgres import _unprivileged_identity
from app.cli.up.processes import StartError
from app.core import pooler
from app.core.settings import Settings
from tests.postgres import PostgresServer

HOST = "127.0.0.1"
CONNECTIONS = 6  # to PostgreSQL: fewer than the pools of two processes
_START_SECONDS = 20.0


def binary() -> str:
    """The program of LLM_TEST_PGBOUNCER, else the system's; skips the test where there is none."""
    found = os.environ.get("LLM_TEST_PGBOUNCER") or shutil.which(
        "pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin"
    )
    if found is None:
        pytest.skip("needs pgbouncer")
    return found


class PgBouncer(processes.ChildPart):
    """A PgBouncer on a port of its own, which survives its restarts."""

    def __init__(self, directory: Path, server: PostgresServer, host: str = HOST) -> None:
        super().__init__("PgBouncer", directory / "pgbouncer.log", grace=5)
        self._binary = binary()
        folder = directory / "pgbouncer"
        folder.mkdir()
        self._users, self._file = folder / "users.txt", folder / "pgbouncer.ini"
        self._host = host
        self.port = processes.free_port()
        self._write(server)

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def _write(self, server: PostgresServer) -> None:
        self._users.write_text(f'"{server.user}" "{server.password}"\n')
        self._file.write_text(
            "[databases]\n"
            f"* = host={server.host} port={server.port}\n"
            "[pgbouncer]\n"
            f"listen_addr = {self._host}\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = scram-sha-256\nauth_file = {self._users}\nadmin_users = {server.user}\n"
            "pool_mode = transaction\nmax_client_conn = 500\n"
            f"default_pool_size = {CONNECTIONS}\nserver_login_retry = 1\n"
            "tcp_user_timeout = 5000\nquery_wait_timeout = 15\n"  # docs/scaling.md
        )

    async def start(self, report: Callable[[str], None] = lambda _: None) -> None:
        report("starting")
        self._process = process = self._spawn()
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            if process.poll() is not None:
                raise StartError(processes.last_lines(self.log_file, 0, 1))
            try:
                _, writer = await asyncio.open_connection(self._host, self.port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
        raise StartError("PgBouncer does not listen")

    def _spawn(self) -> subprocess.Popen[bytes]:
        return processes.spawn(
            [self._binary, str(self._file)],
            log_file=self.log_file,
            env={"PATH": os.defpath},
            # PgBouncer refuses to run as root.
            identity=_unprivileged_identity() if os.geteuid() == 0 else (),
        )

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
    """Give the role its settings, as docs/scaling.md has it."""
    for name, value in pooler.session_settings(settings).items():
        await server.execute(
            f"ALTER ROLE {settings.database_user} IN DATABASE {settings.database_name} "
            f"SET {name} = '{value}'"
        )
