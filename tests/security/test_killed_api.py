"""Results of clients whose API process was killed: cancelled, since no client waits for them."""

import asyncio
import contextlib
from uuid import UUID

import asyncpg
import pytest

from app.core.ids import new_id
from app.queue import api_processes
from tests.conftest import Service
from tests.integration.support import until

BODY = {"model": "scripted", "prompt": "x", "max_tokens": 4}
INSERT = "INSERT INTO api_processes VALUES ($1, now() + make_interval(secs => $2))"


async def test_results_of_a_killed_api_are_cancelled(
    api: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker runs: all wait, one is marked as claimed. Those of a living process stay.

    Each page of them is a transaction of its own, one result long here.
    """
    monkeypatch.setattr(api_processes, "MAX_BATCH", 1)
    requests = [asyncio.create_task(api.client.post("/v1/completions", json=BODY)) for _ in "abc"]

    async def waiting() -> list[UUID] | None:
        rows = await connection.fetch(
            "SELECT id FROM results WHERE waiter_id IS NOT NULL ORDER BY id"
        )
        return [row["id"] for row in rows] if len(rows) == len(requests) else None

    queued, running, kept = await until(waiting)
    dead, alive, worker = new_id(), new_id(), new_id()
    await connection.execute(INSERT, dead, -1.0)
    await connection.execute(INSERT, alive, 60.0)
    move = "UPDATE results SET waiter_id = $2 WHERE id = ANY($1::uuid[])"
    await connection.execute(move, [queued, running], dead)
    await connection.execute(move, [kept], alive)
    claim = "UPDATE results SET worker_id = $2, attempt = 1, started_at = now() WHERE id = $1"
    await connection.execute(claim, running, worker)

    database = api.services.database
    page = await database.run(lambda one: api_processes.results_of(one, [dead]))
    assert len(page) == 1
    assert await api.services.queue.cancel_abandoned(lease_seconds=0.0) == 2

    rows = await connection.fetch("SELECT id, error_code, cancel_requested_at FROM results")
    found = {row["id"]: (row["error_code"], row["cancel_requested_at"] is not None) for row in rows}
    assert found == {queued: ("cancelled", True), running: (None, True), kept: (None, False)}
    left = [row["id"] for row in await connection.fetch("SELECT id FROM api_processes")]
    assert dead not in left
    assert {alive, api.services.api_process.id} <= set(left)
    for request in requests:
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
