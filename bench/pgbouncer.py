"""PgBouncer as a child, which pools transactions before a PostgreSQL."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.cli.up import processes
from app.cli.up.postgres import _unprivileged_identity
from app.cli.up.processes import StartError
from app.core import pooler
from app.core.settings import Settings

_START_SECONDS = 20.0


@dataclass(frozen=True)
class Address:
    """PostgreSQL's, and a user that may create databases on it."""

    host: str
    port: int
    user: str
    password: str


def binary() -> str | None:
    """The program of LLM_TEST_PGBOUNCER, else the system's; None where there is none."""
    return os.environ.get("LLM_TEST_PGBOUNCER") or shutil.which(
        "pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin"
    )


class PgBouncer(processes.ChildPart):
    """A PgBouncer on a port of its own, which survives its restarts."""

    def __init__(
        self, program: str, directory: Path, server: Address, host: str, connections: int
    ) -> None:
        """`host`: its own address; `connections`: to PostgreSQL, at most."""
        super().__init__("PgBouncer", directory / "pgbouncer.log", grace=5)
        self._program = program
        folder = directory / "pgbouncer"
        folder.mkdir()
        self._users, self._file = folder / "users.txt", folder / "pgbouncer.ini"
        self._host = host
        self._connections = connections
        self.port = processes.free_port()
        self._write(server)

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def _write(self, server: Address) -> None:
        self._users.write_text(f'"{server.user}" "{server.password}"\n')
        self._file.write_text(
            "[databases]\n"
            f"* = host={server.host} port={server.port}\n"
            "[pgbouncer]\n"
            f"listen_addr = {self._host}\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = scram-sha-256\nauth_file = {self._users}\nadmin_users = {server.user}\n"
            "pool_mode = transaction\nmax_client_conn = 500\n"
            f"default_pool_size = {self._connections}\nserver_login_retry = 1\n"
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
            [self._program, str(self._file)],
            log_file=self.log_file,
            env={"PATH": os.defpath},
            # PgBouncer refuses to run as root.
            identity=_unprivileged_identity() if os.geteuid() == 0 else (),
        )


def role_settings(settings: Settings) -> list[str]:
    """Statements that give the role its settings, as docs/scaling.md has it."""
    role, database = settings.database_user, settings.database_name
    return [
        f"ALTER ROLE {role} IN DATABASE {database} SET {name} = '{value}'"
        for name, value in pooler.session_settings(settings).items()
    ]
