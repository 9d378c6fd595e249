"""A primary and a standby that streams from it: to be killed, frozen and promoted."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.cli.up.postgres import DATABASE, USER, EmbeddedPostgres
from app.cli.up.service import migrate
from bench import standby
from bench.standby import execute, fetch
from tests.chaos.stack import MortalPostgres
from tests.postgres import PostgresServer


class Standby(standby.Standby, MortalPostgres):
    """A standby that can be killed, frozen and promoted."""

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
        await standby.make_synchronous(self.primary)

    async def until_streaming(self, state: str) -> None:
        await standby.until_streaming(self.primary, state)

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


def address(server: EmbeddedPostgres) -> PostgresServer:
    """Its address, for a stack."""
    return PostgresServer(server.address, server.port, USER, server.password, DATABASE)
