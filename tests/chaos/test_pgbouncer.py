"""API and worker behind a real PgBouncer that pools transactions, and that is killed."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import (
    LEASE_SECONDS,
    PARAMETERS,
    SPEAKING,
    Stack,
    ask_directly,
    check_completed,
    kept_running,
    open_stack,
)
from tests.chaos.stream_client import StreamReader
from tests.conftest import make_settings
from tests.pgbouncer import CONNECTIONS, PgBouncer, set_role
from tests.postgres import PostgresServer

pytestmark = pytest.mark.timeout(300)

# Time-out of a request: PgBouncer is down for a part of it.
TIMEOUT_SECONDS = 10.0
_AWAY_SECONDS = 3.0


@dataclass
class Pooled:
    """The service behind PgBouncer."""

    stack: Stack
    bouncer: PgBouncer


@pytest.fixture
async def pooled(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Pooled]:
    bouncer = PgBouncer(tmp_path, postgres_server)
    await bouncer.start()
    try:
        settings = make_settings(
            postgres_server, database_name, database_timeout_seconds=TIMEOUT_SECONDS
        )
        await set_role(postgres_server, settings)
        changes = {
            "LLM_DATABASE_URL": bouncer.address,
            "LLM_DATABASE_LISTENER_URL": f"{postgres_server.host}:{postgres_server.port}",
            "LLM_DATABASE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
        }
        async with (
            kept_running(triton) as deaths,
            open_stack(tmp_path, postgres_server, database_name, triton, **changes) as stack,
        ):
            stack.triton_deaths = deaths
            await stack.start_worker("alice", LLM_DATABASE_ADMIN_USER=postgres_server.user)
            yield Pooled(stack, bouncer)
    finally:
        await bouncer.stop()


async def test_submit_wait_stream_and_cancel(pooled: Pooled, triton: EmbeddedTriton) -> None:
    """More clients than PgBouncer has connections to PostgreSQL."""
    stack = pooled.stack
    prompts = [f"Pooled {number} {{{{chunks=20 delay_ms=300}}}}" for number in range(100)]
    accepted = await stack.send(prompts)
    forever = await stack.send([f"Forever {n} {{{{chunks=5000 delay_ms=50}}}}" for n in range(10)])
    readers = [StreamReader(one) for one in list(accepted)[:20]]
    port = stack.ports["api"]
    reading = asyncio.gather(*(reader.read_to_the_end(lambda: port) for reader in readers))
    waiting = asyncio.gather(*(stack.client.get(f"/results/{one}?wait=30") for one in accepted))
    await stack.until(SPEAKING, len(accepted) + len(forever), 60)
    cancels = await asyncio.gather(
        *(stack.client.post(f"/results/{one}/cancel", None) for one in forever)
    )
    assert {answer.status for answer in cancels} == {200}
    assert {answer.json["state"] for answer in await waiting} == {"completed"}
    await asyncio.wait_for(reading, 60)
    for reader in readers:
        reader.check_end()
    await check_completed(stack, accepted, await ask_directly(triton, prompts))
    assert {row["state"] for row in await stack.read(forever)} == {"failed"}
    await check_history(stack)
    check_logs(stack)


async def test_an_ended_result_wakes_its_waiter(pooled: Pooled) -> None:
    """The listener receives what is notified through PgBouncer: no poll finds it."""
    body = {"model": "scripted", "content": "Quick {{chunks=2}}", "parameters": PARAMETERS}
    loop = asyncio.get_running_loop()
    passed = []
    for _ in range(20):
        result = (await pooled.stack.client.post("/results/", body)).json
        began = loop.time()
        answer = await pooled.stack.client.get(f"/results/{result['id']}?wait=30")
        passed.append(loop.time() - began)
        assert answer.json["state"] == "completed"
    assert sorted(passed)[10] < 0.5, passed


async def test_its_connections_are_few(pooled: Pooled) -> None:
    """PostgreSQL has PgBouncer's connections, and two or fewer of each process."""
    await pooled.stack.send([f"Many {number} {{{{chunks=3}}}}" for number in range(200)])
    (row,) = await pooled.stack.fetch(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    )
    assert row["count"] <= CONNECTIONS + 2 * 2 + 1


async def test_pgbouncer_is_killed(pooled: Pooled, triton: EmbeddedTriton) -> None:
    """Requests under way wait for it; the worker keeps its lease and its results."""
    stack, bouncer = pooled.stack, pooled.bouncer
    long = [f"Long {n} {{{{chunks=30 delay_ms=500}}}}" for n in range(50)]
    late = [f"Late {n} {{{{chunks=5}}}}" for n in range(50)]
    accepted = await stack.send(long)
    readers = [StreamReader(one) for one in list(accepted)[:10]]
    port = stack.ports["api"]
    reading = asyncio.gather(*(reader.read_to_the_end(lambda: port) for reader in readers))
    waiting = asyncio.gather(*(stack.client.get(f"/results/{one}?wait=60") for one in accepted))
    await stack.until(SPEAKING, len(accepted), 60)

    bouncer.kill()
    sending = asyncio.create_task(stack.send(late))
    assert await bouncer.wait()
    await asyncio.sleep(_AWAY_SECONDS)  # the outage's duration
    await bouncer.start()
    accepted |= await sending

    assert {answer.json["state"] for answer in await waiting} == {"completed"}
    await asyncio.wait_for(reading, 60)
    for reader in readers:
        reader.check_end()
    await stack.until_terminal(60)
    await check_completed(stack, accepted, await ask_directly(triton, long + late))
    if not stack.triton_deaths:
        assert await stack.count("attempt > 1") == 0
    await check_history(stack)
    check_logs(stack)


async def test_pgbouncer_is_away_for_longer_than_a_lease(pooled: Pooled) -> None:
    """Leases are renewed past it; a request that finds none in its time gets 503."""
    stack, bouncer = pooled.stack, pooled.bouncer
    accepted = await stack.send([f"Away {n} {{{{chunks=30 delay_ms=700}}}}" for n in range(20)])
    await stack.until(SPEAKING, len(accepted), 60)
    await bouncer.stop()
    body = {"model": "scripted", "content": "Refused", "parameters": PARAMETERS}
    answer = await stack.client.post("/results/", body)  # it waits for TIMEOUT_SECONDS
    assert (answer.status, answer.json["code"]) == (503, "database_unavailable")
    assert TIMEOUT_SECONDS > LEASE_SECONDS
    await bouncer.start()
    await stack.until_terminal(90)
    assert {row["state"] for row in await stack.read(accepted)} == {"completed"}
    if not stack.triton_deaths:
        assert await stack.count("attempt > 1") == 0
    await check_history(stack)
    check_logs(stack)
