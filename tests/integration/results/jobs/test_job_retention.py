"""Retention of jobs: after their end, with their keys, and no job that has pending rows."""

from typing import Any

import asyncpg
import pytest

from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.results.jobs.support import act, new_job, row, send_rows, until_ended
from tests.integration.results.test_retention import look
from tests.integration.support import until

DAY = 86_400.0
# The time of creation is in the id: each job is made older with its rows.
OLDER = """
WITH moved AS (SELECT id, overlay(id::text placing '01890000-0000' from 1 for 13)::uuid AS older FROM jobs)
, rows AS (UPDATE job_rows r SET job_id = m.older FROM moved m WHERE r.job_id = m.id)
, progress AS (UPDATE job_progress p SET job_id = m.older, changed_at = now() - interval '2 days'
  FROM moved m WHERE p.job_id = m.id)
UPDATE jobs j SET id = m.older, closed_at = closed_at - interval '2 days',
  ended_at = ended_at - interval '2 days' FROM moved m WHERE j.id = m.id
"""


@pytest.mark.trial
async def test_jobs_are_deleted_after_their_end(
    api: Service, settings: Settings, connection: asyncpg.Connection
) -> None:
    jobs: dict[str, dict[str, Any]] = {}
    for name in ("ended", "pending", "idle", "waiting"):
        jobs[name] = await new_job(api, name=name)
    await send_rows(api, [row(jobs[name], "a") for name in ("ended", "pending", "waiting")])
    await act(api, jobs["ended"], "cancel")
    await until_ended(api, jobs["ended"])
    await act(api, jobs["pending"], "close")

    async def are_counted() -> bool:
        return bool(await connection.fetchval("SELECT count(*) = 0 FROM job_events"))

    await until(are_counted)
    await look(settings, results=DAY)
    assert len((await api.client.get("/jobs")).json()) == 4  # all are young
    await connection.execute("SET session_replication_role = replica")
    await connection.execute(OLDER)
    await look(settings, results=3 * DAY)
    assert len((await api.client.get("/jobs")).json()) == 4
    await look(settings, results=DAY)
    left = {one["name"] for one in (await api.client.get("/jobs")).json()}
    assert left == {"pending", "waiting"}

    async def are_removed() -> bool:
        return bool(await connection.fetchval("SELECT count(*) = 2 FROM jobs"))

    await until(are_removed)
    assert await connection.fetchval("SELECT count(*) FROM job_rows") == 2
