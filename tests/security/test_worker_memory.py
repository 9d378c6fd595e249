"""A worker claims as many results as its memory has room for, and always one."""

from itertools import pairwise
from uuid import UUID

import asyncpg
import orjson
import pytest

from app.core.settings import Settings
from app.queue.result_size import expected_bytes, expected_bytes_sql
from tests.conftest import run_service
from tests.integration.queue.queue_bench import MODEL, Bench, make_result
from tests.integration.support import read

LARGE = {"max_tokens": 1_000, "logprobs": 20}
SIZE = expected_bytes(len("a prompt"), LARGE)


async def claimed(bench: Bench, worker: UUID, room: int) -> list[UUID]:
    batches = bench.queue.claims(worker, {MODEL: 100}, room)
    return [claim.id async for batch in batches for claim in batch]


@pytest.mark.parametrize("max_running", [None, 50])
async def test_a_claim_ends_with_the_result_that_takes_the_rest(
    bench: Bench, max_running: int | None
) -> None:
    if max_running is not None:
        await bench.limit_running(max_running)
    ids = await bench.add(6, parameters=orjson.dumps(LARGE).decode())
    worker = await bench.worker()
    assert await claimed(bench, worker, 0) == []
    assert await claimed(bench, worker, 1) == ids[:1]
    assert sorted(await claimed(bench, worker, SIZE + 1)) == ids[1:3]
    assert sorted(await claimed(bench, worker, 3 * SIZE)) == ids[3:]


async def test_statements_and_workers_expect_the_same(bench: Bench) -> None:
    parameters = [{}, {"max_tokens": 7}, {"max_tokens": 7, "logprobs": 0}, LARGE]
    prompts = [None, "a rendered prompt"]
    results = [
        make_result(parameters=orjson.dumps(one).decode(), prompt=prompt)
        for one in parameters
        for prompt in prompts
    ]
    assert all(await bench.queue.enqueue(results))
    rows = await bench.connection.fetch(
        f"SELECT r.id, {expected_bytes_sql('r')} AS bytes FROM results r"
    )
    sizes = {row["id"]: row["bytes"] for row in rows}
    claims = await bench.claim(await bench.worker())
    assert {claim.id: claim.expected_bytes for claim in claims} == sizes
    assert len(set(sizes.values())) == len(results)


async def test_results_larger_than_the_memory_run_one_after_another(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Each end makes room, at once: the worker does not poll within this test."""
    small = settings.model_copy(update={"worker_memory_bytes": 1, "poll_seconds": 60.0})
    async with run_service(small, with_worker=True) as service:
        # In one request: each later one is claimed, and the first may start without a claim.
        bodies = [
            {"model": "scripted", "content": f"{n} {{{{chunks=3 delay_ms=20}}}}"} for n in range(4)
        ]
        answer = await service.client.post("/results/", json=bodies)
        for one in answer.json():
            result = await read(service, one["id"], wait=30)
            assert result["state"] == "completed"
    rows = await connection.fetch("SELECT started_at, finished_at FROM results ORDER BY id")
    for earlier, later in pairwise(rows):
        assert earlier["finished_at"] <= later["started_at"]
