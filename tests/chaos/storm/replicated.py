"""A primary with a synchronous standby, as one part of the storm: the standby may take the primary's place."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncpg

from app.cli.up.postgres import EmbeddedPostgres
from app.cli.up.processes import StartError
from bench.standby import execute, fetch
from tests.chaos.replication import Pair, Standby
from tests.chaos.stack import MortalPostgres

_FAILURES = (StartError, OSError, AssertionError, TimeoutError, asyncpg.PostgresError)
_PAUSE_SECONDS = 0.5
_STALL_SECONDS = 0.5
# A standby looks for its primary that often; PostgreSQL's default is 5 s, in which nothing is committed.
_RETRY = "ALTER SYSTEM SET wal_retrieve_retry_interval = '500ms'"
_ALONE = "ALTER SYSTEM RESET synchronous_standby_names"
_RELOAD = "SELECT pg_reload_conf()"
_FORGET = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active"


class ReplicatedPostgres:
    """The present primary and its standby; a new standby follows each failover."""

    def __init__(self, directory: Path) -> None:
        self.primary = MortalPostgres(directory / "postgres", directory / "postgres.log")
        self._directory = directory
        self._standby: Standby | None = None  # once it has every commit
        self._standbys = 0
        self._fails_over = False
        self._move: Callable[[EmbeddedPostgres], Awaitable[None]]

    @contextlib.asynccontextmanager
    async def replicated(
        self, move: Callable[[EmbeddedPostgres], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Have a synchronous standby; `move` directs all clients to a new primary."""
        self._move = move
        await execute(self.primary, _RETRY)
        await execute(self.primary, _RELOAD)
        await self._replicate()
        keeping = asyncio.create_task(self._keep_replicated())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    # --- as a part that is kept running, and a victim ---------------------------------------------------

    async def start(self) -> None:
        """Start the primary again; if it was lost to a failover, promote its standby."""
        if self._fails_over:
            try:
                await self._promote()
            except _FAILURES as error:
                raise StartError(f"no promotion: {error!r}") from error
        else:
            await self.primary.start()

    async def wait(self) -> str:
        """Wait for the end of the primary; returns its reason."""
        return await self.primary.wait()

    async def stop(self) -> None:
        """Stop both servers."""
        await self.primary.stop()
        if self._standby is not None:
            await self._standby.stop()

    def send_signal(self, number: signal.Signals) -> None:
        self.primary.send_signal(number)

    async def fail_over(self) -> None:
        """Lose the primary for good, shortly after its connection to the standby.

        A commit that did not wait for the standby is lost. Raises AssertionError without a standby.
        """
        assert self._standby is not None, "there is no standby yet"
        await Pair(self.primary, self._standby).stall()
        # Commits that do not wait for the standby are lost in this time.
        await asyncio.sleep(_STALL_SECONDS)
        self._fails_over = True
        self.send_signal(signal.SIGKILL)

    # --- failover ----------------------------------------------------------------------------------------

    async def _promote(self) -> None:
        standby = self._standby
        assert standby is not None
        if (await fetch(standby, "SELECT pg_is_in_recovery()"))[0][0]:
            await standby.promote()
        # It would wait for a standby of its own.
        await execute(standby, _ALONE)
        await execute(standby, _RELOAD)
        lost, self.primary, self._standby = self.primary, standby, None
        self._fails_over = False
        await self._move(standby)
        await lost.stop()
        shutil.rmtree(lost.directory, ignore_errors=True)

    async def _keep_replicated(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            if self._standby is None:
                with contextlib.suppress(*_FAILURES):  # the primary has failed meanwhile
                    await self._replicate()

    async def _replicate(self) -> None:
        """Make a standby of the primary, and have each commit wait for it."""
        self._standbys += 1
        name = f"standby_{self._standbys}"
        await execute(self.primary, _FORGET)
        standby = Standby(self._directory / name, self._directory / f"{name}.log", self.primary)
        try:
            await standby.start()
            await Pair(self.primary, standby).make_synchronous()
        except BaseException:
            # Commits would wait for it.
            with contextlib.suppress(*_FAILURES):
                await execute(self.primary, _ALONE)
                await execute(self.primary, _RELOAD)
            await standby.stop()
            raise
        self._standby = standby
