"""A data set mapped through a network that loses answers, by processes that are killed."""

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from app.core.settings import Settings
from tests.conftest import Service
from tests.faulty_proxy import FaultyProxy
from tests.integration.client.support import run_killed
from tests.integration.support import serve

ROWS = 2000
# Short lists: some hundred answers, of which one in eight is replaced.
PROGRAM = """
import sys
from llm_api_client import Client
from llm_api_client.jobs import batches
batches.MAX_ROWS = 50
rows = [{"id": f"k{i}", "topic": f"topic-{i}"} for i in range(int(sys.argv[1]))]
with Client() as client:
    job = client.map(
        rows, "{{{{delay_ms=1 text={topic}}}}}", model="scripted", key="id", out=sys.argv[2]
    )
    failed = [row for row in job if row.error is not None]
    print(job.info().counts.completed if not failed else failed[:3])
"""


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.mark.trial
async def test_each_row_once_through_a_bad_network(
    one: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    """Three processes, one after the other; none reports a row as failed that is completed."""
    out = tmp_path / "answers.jsonl"
    proxy = FaultyProxy(str(one.client.base_url), share=0.12, seed=43)
    async with proxy.run():
        answers = await run_killed(
            one, PROGRAM, ROWS, out, at=(ROWS // 4, ROWS // 2), url=proxy.url
        )
    assert all(line["text"] == line["key"].replace("k", "topic-") for line in answers)
    assert (tmp_path / "answers.jsonl.failed.jsonl").read_bytes() == b""
    assert await connection.fetchval("SELECT count(*) FROM results") == ROWS
    assert sum(proxy.faults.values()) >= 10, (proxy.faults, proxy.requests)
