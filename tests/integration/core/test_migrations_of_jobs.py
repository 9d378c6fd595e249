"""Migrations of the tables of jobs, with rows in them, while processes of the former version run."""

import asyncio

from app.core.settings import Settings
from tests.conftest import migrate
from tests.integration.core.test_migrations import SCHEMA, empty, rows

__all__ = ["empty"]

JOBS = [
    f"""INSERT INTO jobs (id, team_id, priority, max_rows, closed_at, ended_at) VALUES
        ('{job}', 'default', 0, 9, now(), {ended})"""
    for job, ended in (
        ("01890000-0000-7000-8000-000000000001", "NULL"),
        ("01890000-0000-7000-8000-000000000002", "now()"),
    )
] + ["INSERT INTO job_progress (job_id, rows, last_place) SELECT id, 9, 7 FROM jobs"]
PROGRESS = "SELECT to_jsonb(p)::text FROM job_progress p ORDER BY job_id"


def test_jobs_that_run_get_a_speed_from_then_on(empty: Settings) -> None:
    """Revision 0026, up and down with rows in its table."""
    migrate(empty, "0025")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in JOBS:
        asyncio.run(rows(empty, statement))
    progress = asyncio.run(rows(empty, PROGRESS))
    migrate(empty, "0026")
    began = "SELECT began_place::text FROM job_progress WHERE began_at <= now() ORDER BY job_id"
    assert asyncio.run(rows(empty, began)) == ["7", "0"]
    # A process of the former version creates a job.
    asyncio.run(rows(empty, JOBS[0].replace("000000000001", "000000000003")))
    added = "INSERT INTO job_progress (job_id) SELECT id FROM jobs WHERE id > '{}'"
    asyncio.run(rows(empty, added.format("01890000-0000-7000-8000-000000000002")))
    assert asyncio.run(rows(empty, began)) == ["7", "0", "0"]
    migrate(empty, "0025", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, PROGRESS))[:2] == progress
    migrate(empty)
