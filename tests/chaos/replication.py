"""A primary and a standby that streams from it: to be killed, frozen and promoted."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psutil

from app.cli.up import processes
from app.cli.up.postgres import DATABASE, NOBODY, USER, EmbeddedPostgres
from app.cli.up.processes import StartError
from app.cli.up.service import migrate
from tests.chaos.stack import MortalPostgres, until
from tests.postgres import PostgresServer

STANDBY = "standby"  # its name in synchronous_standby_names, and of its slot
_PATIENCE = 30.0  # seconds


class Standby(MortalPostgres):
    """Made by pg_basebackup from a primary that is up, which keeps the log for it in a slot."""

    def __init__(self, directory: Path, log_file: Path, primary: EmbeddedPostgres) -> None:
        super().__init__(directory, log_file)
        self._primary = primary

    async def _initialise(self, binaries: Path) -> None:
        self.directory.mkdir(mode=0o700)
        password_file = self.directory / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self._primary.password)
        self._cluster.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(self._cluster, NOBODY, NOBODY)
        source = (
            f"host={self._primary.address} port={self._primary.port} user={USER} "
            f"password={self._primary.password} application_name={STANDBY}"
        )
        options = [f"--dbname={source}", f"--pgdata={self._cluster}", "--write-recovery-conf"]
        options += ["--create-slot", f"--slot={STANDBY}", "--checkpoint=fast"]
        process = self._spawn([binaries / "pg_basebackup", *options])
        if await processes.wait_exit(process) != 0:
            last = processes.last_lines(self.log_file, 0)
            raise StartError(f"pg_basebackup failed: {last}")

    async def _ensure_database(self) -> None:
        """It came with the copy."""
        await execute(self, "SELECT 1")

    async def promote(self) -> None:
        """Make it a primary; returns when it takes writes."""
        await execute(self, "SELECT pg_promote()")


@dataclass
class Pair:
    """Both servers; their database is migrated."""

    primary: MortalPostgres
    standby: Standby

    @property
    def addresses(self) -> str:
        """LLM_DATABASE_URL."""
        return ",".join(f"{one.address}:{one.port}" for one in (self.primary, self.standby))

    async def make_synchronous(self) -> None:
        """From now on nothing is committed that the standby has not on its disk."""
        await execute(self.primary, f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY}'")
        await execute(self.primary, "SELECT pg_reload_conf()")
        await self.until_streaming("sync")

    async def until_streaming(self, state: str) -> None:
        """Wait until the standby streams, with this `sync_state`."""

        async def is_so() -> bool:
            query = "SELECT state, sync_state FROM pg_stat_replication"
            rows = [tuple(row) for row in await fetch(self.primary, query)]
            return rows == [("streaming", state)]

        await until(is_so, _PATIENCE, f"the standby streams ({state})")

    async def stall(self) -> None:
        """Have the primary send nothing more, as over a network that stalls."""
        for row in await fetch(self.primary, "SELECT pid FROM pg_stat_replication"):
            psutil.Process(row["pid"]).send_signal(signal.SIGSTOP)


@contextlib.asynccontextmanager
async def open_pair(
    directory: Path, log: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Pair]:
    """Start a primary, migrate its database, and start a standby, not synchronous yet."""
    primary = MortalPostgres(directory / "primary", directory / "primary.log")
    standby = Standby(directory / "standby", directory / "standby.log", primary)
    try:
        await primary.start()
        log(f"primary on port {primary.port}")
        await migrate({**os.environ, **primary.environment}, directory / "migrate.log")
        await standby.start()
        pair = Pair(primary, standby)
        await pair.until_streaming("async")
        log(f"standby on port {standby.port}, by pg_basebackup, streaming through a slot")
        yield pair
    finally:
        await asyncio.gather(primary.stop(), standby.stop())


async def execute(server: EmbeddedPostgres, statement: str) -> None:
    """Run a statement that has no answer, on a connection of its own."""
    await fetch(server, statement)


async def fetch(server: EmbeddedPostgres, query: str) -> list[asyncpg.Record]:
    """Ask a server, whichever it is."""
    connection = await asyncpg.connect(
        host=server.address,
        port=server.port,
        user=USER,
        password=server.password,
        database=DATABASE,
    )
    try:
        return list(await connection.fetch(query))
    finally:
        await connection.close()


def address(server: EmbeddedPostgres) -> PostgresServer:
    """Its address, for a stack."""
    return PostgresServer(server.address, server.port, USER, server.password, DATABASE)
