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
    accepted = await send(api, "x")
    dead, alive = new_id(), new_id()
    insert = (
        "INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)"
        " VALUES ($1, 'h', 1, now() + interval '5 minutes', now() - make_interval(days => $2))"
    )
    if dead_days is not None:
        await connection.execute(insert, dead, dead_days)
    await connection.execute(insert, alive, None)
    kept = await send(api, "y")
    claim = "UPDATE results SET worker_id = $2, attempt = 1, started_at = now() WHERE id = $1"
    await connection.execute(claim, accepted["id"], dead)
    await connection.execute(claim, kept["id"], alive)
    assert await api.services.queue.rescue(15.0) == 1
    rows = await connection.fetch("SELECT id::text, worker_id FROM results")
    owners = {row["id"]: row["worker_id"] for row in rows}
    assert owners == {accepted["id"]: None, kept["id"]: alive}
