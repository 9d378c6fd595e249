"""A standby that streams from a primary, and commits that wait for it."""

import asyncio
import os
from pathlib import Path

import asyncpg

from app.cli.up import processes
from app.cli.up.postgres import DATABASE, NOBODY, USER, EmbeddedPostgres
from app.cli.up.processes import StartError

STANDBY = "standby"  # its name in synchronous_standby_names, and of its slot
_STREAMING_SECONDS = 30.0


class Standby(EmbeddedPostgres):
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


async def make_synchronous(primary: EmbeddedPostgres) -> None:
    """From now on nothing is committed that the standby has not on its disk."""
    await execute(primary, f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY}'")
    await execute(primary, "SELECT pg_reload_conf()")
    await until_streaming(primary, "sync")


async def until_streaming(primary: EmbeddedPostgres, state: str) -> None:
    """Wait until the standby streams, with this `sync_state`."""
    query = "SELECT state, sync_state FROM pg_stat_replication"
    deadline = asyncio.get_running_loop().time() + _STREAMING_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        if [tuple(row) for row in await fetch(primary, query)] == [("streaming", state)]:
            return
        await asyncio.sleep(0.05)
    raise StartError(f"the standby does not stream ({state})")


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
