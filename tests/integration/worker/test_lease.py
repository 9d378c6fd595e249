"""The fence of a lease: from which moment a worker counts the time that is left to it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import asyncpg
import pytest

from app.core.database import Connection, Database
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.worker.lease import FencedError, Lease, Load
from tests.conftest import connect
from tests.integration.support import until

_LEASE_SECONDS = 5.0  # renewed each second; a renewal may last two

_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%UPDATE workers%'
"""


def idle(*_: object) -> Load:
    return Load("{}", "{}")


@dataclass
class Beats:
    """Counts the heartbeats of a lease."""

    count: int = 0

    async def __call__(self, _connection: Connection) -> None:
        self.count += 1


@contextlib.asynccontextmanager
async def kept(lease: Lease, beats: Beats) -> AsyncIterator[None]:
    """Renew the lease meanwhile."""
    keeping = asyncio.create_task(lease.keep(idle, beats))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def test_the_fence_counts_from_the_request_of_a_slow_renewal(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """The database may have judged the lease by any moment since then."""
    beats = Beats()
    async with Database(settings, "test") as database:
        lease = Lease(database, _LEASE_SECONDS)
        await lease.register()
        other = await connect(settings)
        async with other.transaction():
            await other.execute("SELECT FROM workers WHERE id = $1 FOR UPDATE", lease.id)
            async with kept(lease, beats):
                await until(lambda: connection.fetchval(_WAITING))
                asked_before = time.monotonic()
                await asyncio.sleep(0.2)  # the renewal is slow
                await other.execute("COMMIT")
                await until(lambda: asyncio.sleep(0, beats.count))
            await other.execute("BEGIN")
        await other.close()
    assert lease._renewed_at <= asked_before


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError, OSError])
async def test_a_renewal_that_fails_does_not_move_the_fence(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """An unreachable server may have given the results to another worker."""
    tried = await _try_to_renew(settings, monkeypatch, error)
    assert tried._renewed_at < tried.began


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError, asyncpg.CannotConnectNowError, asyncpg.AdminShutdownError]
)
async def test_a_server_that_is_down_moves_the_fence(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It gives the results to no worker, and leases are judged a full one after its start."""
    tried = await _try_to_renew(settings, monkeypatch, error)
    assert tried._renewed_at >= tried.began


class _TriedLease(Lease):
    began = 0.0


async def _try_to_renew(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> _TriedLease:
    """A lease whose renewals fail when they connect, after two of them."""
    tries = 0

    async def fail(_database: Database, _name: str) -> asyncpg.Connection:
        nonlocal tries
        tries += 1
        raise error("no connection")

    async with Database(settings, "test") as database:
        lease = _TriedLease(database, _LEASE_SECONDS)
        await lease.register()
        monkeypatch.setattr(Database, "connect", fail)
        lease.began = time.monotonic()
        async with kept(lease, Beats()):
            await until(lambda: asyncio.sleep(0, tries >= 2))
    return lease


async def test_a_lost_renewal_is_repeated_long_before_the_next_is_due(settings: Settings) -> None:
    begun = asyncio.get_running_loop().time()
    beats = Beats()

    async def lose_the_first(connection: Connection) -> None:
        await beats(connection)
        if beats.count == 1:
            raise ConnectionResetError

    async with Database(settings, "test") as database:
        lease = Lease(database, 500 * _LEASE_SECONDS)  # renewed every 500 s
        await lease.register()
        keeping = asyncio.create_task(lease.keep(idle, lose_the_first))
        while beats.count < 2:
            assert asyncio.get_running_loop().time() - begun < lease.period / 2
            await asyncio.sleep(0.1)
        await cancel_all([keeping])


async def test_a_worker_is_fenced_after_two_thirds_of_a_lease(settings: Settings) -> None:
    async with Database(settings, "test") as database:
        lease = Lease(database, 1.5)
        await lease.register()
        with pytest.raises(FencedError, match=r"no renewal for 1\.0 s"):
            await lease.watch_fence()


async def test_a_short_lease_is_fenced_at_its_end_and_not_before(settings: Settings) -> None:
    """A worker that stops early hands back results that it could have finished."""
    began = time.monotonic()
    lease = Lease(Database(settings, "unused"), 0.6)
    with pytest.raises(FencedError):
        await lease.watch_fence()
    assert time.monotonic() - began >= 0.4


async def test_a_worker_that_was_declared_dead_renews_no_more(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with Database(settings, "test") as database:
        lease = Lease(database, _LEASE_SECONDS)
        await lease.register()
        await connection.execute("UPDATE workers SET dead_at = now() WHERE id = $1", lease.id)
        async with asyncio.timeout(20):
            with pytest.raises(FencedError, match="declared dead"):
                await lease.keep(idle, Beats())
