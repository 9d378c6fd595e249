"""A team whose batches wait for a model that is not ready; and another team's batch."""

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.support import until

# More than one process takes.
IDLE = 140
INSERT = """
WITH file AS (
  INSERT INTO files (id, team_id, purpose, filename, size)
  VALUES (gen_random_uuid(), $1, 'batch', 'x', 1) RETURNING id
), made AS (
  INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state, total,
                       expires_at, in_progress_at)
  SELECT gen_random_uuid(), $1, '/v1/completions', file.id, '24h', 'in_progress', 1,
         now() + interval '1 day', now()
  FROM file, generate_series(1, $2) RETURNING id
)
INSERT INTO batch_lines (batch_id, line, custom_id, body)
SELECT id, 1, 'c', $3 FROM made RETURNING batch_id
"""


@pytest.fixture
async def running(settings: Settings) -> AsyncIterator[Service]:
    async with run_service(settings, with_worker=True) as service:
        await service.client.post("/models/scripted/unload")
        yield service
        await service.client.post("/models/scripted/load")


def body(model: str) -> str:
    return json.dumps({"model": model, "prompt": "x", "max_tokens": 1})


async def insert(connection: asyncpg.Connection, team: str, count: int, model: str) -> list[Any]:
    rows = await connection.fetch(INSERT, team, count, body(model))
    await connection.execute("SELECT pg_notify('llm_batches', '')")
    return [row["batch_id"] for row in rows]


async def until_taken(connection: asyncpg.Connection) -> None:
    """Until the process has sent the lines of as many idle batches as it takes."""

    async def are_sent() -> bool:
        query = "SELECT count(*) FROM results WHERE state = 'pending'"
        return bool(await connection.fetchval(query) >= 60)

    await until(are_sent, 60)


@pytest.mark.parametrize("team", ["polite", "hostile"])
async def test_idle_batches_leave_places(
    running: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, team: str
) -> None:
    """Another team's are taken at once; the team's own when idle ones yield."""
    monkeypatch.setattr("app.batches.processor._IDLE_SECONDS", 0.0, raising=False)
    await insert(connection, "hostile", IDLE, "scripted")
    await until_taken(connection)
    # Its only line is refused, so that it ends although the model is not ready.
    (batch,) = await insert(connection, team, 1, "nobody")

    async def has_ended() -> bool:
        query = "SELECT state = 'completed' FROM batches WHERE id = $1"
        return bool(await connection.fetchval(query, batch))

    await until(has_ended, 60)
