"""Results of workers that are gone: freed however long ago the worker died."""

import asyncpg
import pytest

from app.core.ids import new_id
from tests.conftest import Service
from tests.integration.support import send


@pytest.mark.parametrize("dead_days", [0, 2, 400, None], ids=lambda days: f"{days} days")
async def test_results_of_a_dead_worker_are_freed(
    api: Service, connection: asyncpg.Connection, dead_days: int | None
) -> None:
    """Its release may have failed at its death; None: even its row is gone."""
    accepted, last = await send(api, "x"), await send(api, "z")
    dead, alive, last_dead = new_id(), new_id(), new_id()
    insert = (
        "INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)"
        " VALUES ($1, 'h', 1, now() + interval '5 minutes', now() - make_interval(days => $2))"
    )
    if dead_days is not None:
        await connection.execute(insert, dead, dead_days)
        await connection.execute(insert, last_dead, dead_days)
    await connection.execute(insert, alive, None)
    kept = await send(api, "y")
    claim = "UPDATE results SET worker_id = $2, attempt = 1, started_at = now() WHERE id = $1"
    await connection.execute(claim, accepted["id"], dead)
    await connection.execute(claim, kept["id"], alive)
    await connection.execute(claim, last["id"], last_dead)
    died = await connection.fetch("SELECT id, dead_at FROM workers")
    assert await api.services.queue.rescue(15.0) == 2
    rows = await connection.fetch("SELECT id::text, worker_id FROM results")
    owners = {row["id"]: row["worker_id"] for row in rows}
    assert owners == {accepted["id"]: None, kept["id"]: alive, last["id"]: None}
    assert await connection.fetch("SELECT id, dead_at FROM workers") == died


async def test_a_worker_is_marked_dead_once(api: Service, connection: asyncpg.Connection) -> None:
    """Its row is deleted a week after its death: a later mark would keep it."""
    await connection.execute(
        "INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)"
        " VALUES ($1, 'h', 1, now() - interval '2 days', now() - interval '1 day')",
        new_id(),
    )
    died = await connection.fetchval("SELECT dead_at FROM workers")
    await api.services.queue.rescue(0.0)
    assert await connection.fetchval("SELECT dead_at FROM workers") == died
