"""The worker and its lease on real parts: what it does when things around it break."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import asyncpg
import orjson
import pytest

from app.core.ids import new_id
from app.core.listener import ENQUEUED
from app.core.settings import Settings
from app.inference.triton_client import TritonClient
from app.inference.triton_messages import Delta, EarlierText
from app.inference.triton_session import LiveSwitch
from tests.conftest import Service, run_service, short_lease
from tests.integration.support import finish, read, send, until, until_running

# asyncpg leaves its socket to the garbage collector when a connection breaks while it is made.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.usefixtures("collect_broken_sockets"),
]

SLOW = "slow {{chunks=2000 delay_ms=20}}"


async def workers(connection: asyncpg.Connection) -> list[UUID]:
    rows = await connection.fetch("SELECT id FROM workers WHERE dead_at IS NULL ORDER BY id")
    return [row["id"] for row in rows]


async def test_a_stopping_worker_hands_back_what_does_not_fit_its_grace(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    impatient = settings.model_copy(update={"shutdown_grace_seconds": 0.2})
    async with run_service(impatient, with_worker=True) as running:
        accepted = await send(running, SLOW)
        await until_running(running, accepted["id"])
    row = await connection.fetchrow("SELECT * FROM results")
    assert row is not None
    assert (row["state"], row["worker_id"], row["lost_attempts"]) == ("pending", None, 0)
    assert row["attempt_history"] == "[]"
    assert row["text_attempt"] == 1
    assert await connection.fetchval("SELECT count(*) FROM result_chunks") > 0
    assert await workers(connection) == []


async def test_a_stopping_worker_finishes_what_fits(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with run_service(settings, with_worker=True) as running:
        accepted = await send(running, "short {{chunks=20 delay_ms=20}}")
        await until_running(running, accepted["id"])
    assert await connection.fetchval("SELECT state FROM results") == "completed"


@short_lease
@pytest.mark.trial
async def test_a_worker_declared_dead_comes_back_under_a_new_id(
    service: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(service, "x {{chunks=200 delay_ms=20}}")
    await until_running(service, accepted["id"])
    (old,) = await workers(connection)
    await connection.execute("UPDATE workers SET dead_at = now()")

    async def has_new_life() -> bool:
        alive = await workers(connection)
        return len(alive) == 1 and alive[0] != old

    await until(has_new_life)
    result = await read(service, accepted["id"], wait=30)
    assert (result["state"], result["attempt"]) == ("completed", 2)
    assert len(result["result"].split()) == 200
    assert await connection.fetchval("SELECT count(*) FROM result_chunks") == 0


@short_lease
@pytest.mark.trial
async def test_a_claim_whose_answer_was_lost_is_handed_back(
    service: Service, connection: asyncpg.Connection
) -> None:
    """The row names the worker, which never received the result."""
    await service.client.post("/models/scripted/unload")
    try:
        accepted = await send(service, "x {{chunks=2}}")
        (worker,) = await workers(connection)
        await connection.execute(
            "UPDATE results SET worker_id = $1, attempt = 1, started_at = now()", worker
        )
    finally:
        await service.client.post("/models/scripted/load")
    result = await read(service, accepted["id"], wait=20)
    assert (result["state"], result["attempt"]) == ("completed", 2)
    assert await connection.fetchval("SELECT lost_attempts FROM results") == 0


@short_lease
async def test_an_attempt_ended_elsewhere_is_stopped(
    service: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(service, SLOW)
    await until_running(service, accepted["id"])
    await connection.execute(
        "UPDATE results SET state = 'completed', output = 'mine', finished_at = now()"
    )

    async def is_idle() -> bool:
        return bool((await service.client.get("/models/scripted")).json()["running"] == 0)

    await until(is_idle)
    result = await read(service, accepted["id"])
    assert (result["state"], result["result"]) == ("completed", "mine")


async def test_connections_killed_all_the_time_lose_nothing(
    service: Service, connection: asyncpg.Connection
) -> None:
    accepted = [await send(service, f"{n} {{{{chunks=20 delay_ms=20}}}}") for n in range(30)]
    for _ in range(10):
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.1)  # text comes, and its writes lose their connections, too
    results = [await read(service, item["id"], wait=30) for item in accepted]
    assert {result["state"] for result in results} == {"completed"}
    assert {len(result["result"].split()) for result in results} == {20}
    assert await connection.fetchval("SELECT max(lost_attempts) FROM results") == 0


@short_lease
@pytest.mark.trial
async def test_a_lost_workers_results_are_rescued(
    api: Service, settings: Settings, connection: asyncpg.Connection
) -> None:
    """An API process alone frees them, once it has been connected for a lease; then any worker."""
    accepted = await send(api, "x {{chunks=2}}")
    lost = new_id()
    await connection.execute(
        "INSERT INTO workers (id, host, pid, lease_expires_at) VALUES ($1, 'h', 1, now())", lost
    )
    await connection.execute(
        "UPDATE results SET worker_id = $1, attempt = 1, started_at = now()", lost
    )

    async def is_free() -> bool:
        return await connection.fetchval("SELECT worker_id FROM results") is None

    await until(is_free, seconds=20)
    async with run_service(settings, with_worker=True) as running:
        result = await read(running, accepted["id"], wait=20)
    assert (result["state"], result["attempt"]) == ("completed", 2)
    history = orjson.loads(await connection.fetchval("SELECT attempt_history FROM results"))
    assert history[0]["error"]["code"] == "worker_lost"


@pytest.mark.trial
async def test_a_suspect_runs_although_the_queue_is_never_silent(
    service: Service, connection: asyncpg.Connection
) -> None:
    """Notifications that come faster than the poll must not keep a suspect waiting indefinitely."""
    await service.client.post("/models/scripted/unload")
    accepted = await send(service, "x {{chunks=2}}")
    await connection.execute("UPDATE results SET engine_deaths = 2")

    async def never_silent() -> None:
        while True:
            await connection.execute("SELECT pg_notify($1, 'other')", ENQUEUED)
            await asyncio.sleep(0.01)

    noise = asyncio.create_task(never_silent())
    try:
        await service.client.post("/models/scripted/load")
        result = await read(service, accepted["id"], wait=60)
    finally:
        noise.cancel()
        await asyncio.wait([noise])
    assert result["state"] == "completed"


@pytest.mark.trial
async def test_a_request_that_loses_its_engine_each_time_leaves_the_others_alone(
    service: Service,
) -> None:
    innocent = [await send(service, f"{n} {{{{chunks=5 delay_ms=20}}}}") for n in range(5)]
    guilty = await send(service, "x {{chunks=5 lost_at=1}}")
    innocent += [await send(service, f"{n} {{{{chunks=5}}}}") for n in range(5, 10)]
    result = await read(service, guilty["id"], wait=60)
    assert (result["state"], result["error"]["code"]) == ("failed", "engine_crashed")
    assert result["error"]["retryable"] is False
    # One attempt more, which counts for nothing: the text that was lost twice at once is dropped.
    assert result["attempt"] == service.services.settings.max_attempts + 1
    done = [await read(service, item["id"], wait=20) for item in innocent]
    assert {item["state"] for item in done} == {"completed"}
    assert {item["attempt"] for item in done} == {1}


# --- what must never happen, made to happen ---------------------------------------------------------


class BrokenTriton(TritonClient):
    """Answers that our own code or PostgreSQL cannot take."""

    async def run(
        self,
        model: str,
        prompt: str,
        parameters: dict[str, Any],
        on_delta: Callable[[Delta], None],
        traceparent: str | None = None,
        *,
        wants_ids: bool = False,
        earlier: EarlierText | None = None,
        live: LiveSwitch | None = None,
    ) -> None:
        if prompt == "break":
            raise RuntimeError("a bug of ours")
        on_delta(Delta("text", "st\0op", 1, 1, None, 1))


@pytest.fixture
async def broken(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr("app.inference.server_pool.TritonClient", BrokenTriton)
    async with run_service(settings, with_worker=True) as running:
        yield running


@pytest.mark.parametrize("prompt", ["break", "refused by PostgreSQL"])
async def test_a_bug_ends_its_result_instead_of_running_for_ever(
    broken: Service, prompt: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = await finish(broken, prompt)
    assert (result["state"], result["attempt"]) == ("failed", 1)
    assert result["error"]["code"] == "internal_error"
    assert any(record.exc_info for record in caplog.records if record.name.startswith("app."))
