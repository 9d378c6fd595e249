"""Estimates for a pending result: queue position, wait and poll hint."""

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import orjson
import pytest

from app.core.database import Database
from app.core.ids import new_id
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM as TEAM
from app.queue.position import Estimate, QueuePositions
from tests.conftest import Service, run_service
from tests.integration.core.test_query_plans import RecordingDatabase
from tests.integration.support import finish, read, send, until, until_running

SLOW = "slow {{chunks=2000 delay_ms=20}}"


async def get(service: Service, result_id: str, query: str = "") -> httpx.Response:
    answer = await service.client.get(f"/results/{result_id}{query}")
    assert answer.status_code == 200, answer.text
    return answer


async def position(service: Service, result_id: str) -> tuple[Any, Any]:
    """Position and wait, read again."""
    service.services.positions._heads.clear()
    result = (await get(service, result_id)).json()
    return result["queue_position"], result["estimated_wait_seconds"]


async def add_worker(connection: asyncpg.Connection, rate: float, seconds: float = 60.0) -> None:
    """A worker that reports its throughput of the scripted model per second."""
    await connection.execute(
        "INSERT INTO workers (id, host, pid, lease_expires_at, load)"
        " VALUES ($1, 'h', 1, now() + make_interval(secs => $2), $3::jsonb)",
        new_id(),
        seconds,
        orjson.dumps({"scripted": {"running": 1, "results_per_second": rate}}).decode(),
    )


async def test_places_are_told_in_the_order_of_claims(api: Service) -> None:
    low = await send(api, "low", priority=-5)
    first, second = await send(api, "a"), await send(api, "b")
    places = [await position(api, one["id"]) for one in (first, second, low)]
    assert places == [(1, None), (2, None), (3, None)]
    await api.client.post(f"/results/{first['id']}/cancel")
    assert await position(api, low["id"]) == (2, None)


async def test_the_wait_comes_from_the_workers_throughput(
    api: Service, connection: asyncpg.Connection
) -> None:
    accepted = [await send(api, str(n)) for n in range(6)]
    last = accepted[-1]["id"]
    await add_worker(connection, 0.2)
    await add_worker(connection, 0.1)
    await add_worker(connection, 50.0, seconds=-1.0)  # its lease ran out
    assert await position(api, last) == (6, 20.0)
    assert (await get(api, last)).headers["retry-after"] == "20"
    assert (await get(api, accepted[0]["id"])).headers["retry-after"] == "4"
    await connection.execute("UPDATE workers SET dead_at = now()")
    assert await position(api, last) == (6, None)


async def test_an_estimate_is_a_second_old_at_most(api: Service) -> None:
    await send(api, "a")
    second = await send(api, "b")
    assert await position(api, second["id"]) == (2, None)
    await api.client.post("/results/cancel", params={"model_name": "scripted"})
    third = await send(api, "c")
    fresh = (await get(api, third["id"])).json()
    assert fresh["queue_position"] in (None, 1)  # it came after the queue was read

    async def is_first() -> bool:
        return bool((await get(api, third["id"])).json()["queue_position"] == 1)

    await until(is_first, 10)


async def test_pollers_share_one_reading(api: Service) -> None:
    for n in range(50):
        await send(api, str(n))
    async with RecordingDatabase(api.services.settings) as database:
        rows = await database.fetch("SELECT * FROM results ORDER BY id")
        positions = QueuePositions(database)
        clock = asyncio.get_running_loop().time
        began = clock()
        estimates = await asyncio.gather(
            *(
                positions.estimate(row["id"], row["model_name"], is_running=False)
                for row in rows * 10
            )
        )
        assert [one.position for one in estimates] == [*range(1, 51)] * 10
        assert len([query for query, _ in database.statements if "AS head" in query]) == 1
        assert began + 1.0 <= positions._heads["scripted"].expires <= clock() + 1.0


async def test_a_database_that_is_away_is_not_waited_for(api: Service) -> None:
    """The row was read; the estimate is then unknown, not an error."""
    accepted = await send(api, "x")
    row = await api.services.results.get(TEAM, UUID(accepted["id"]))
    nowhere = api.services.settings.model_copy(
        update={"database_host": "127.0.0.1:1", "database_timeout_seconds": 100.0}
    )
    async with Database(nowhere, "test") as database:
        began = asyncio.get_running_loop().time()
        positions = QueuePositions(database)
        estimate = await positions.estimate(row.id, row.model_name, is_running=False)
        assert estimate == Estimate(None, None)
        assert asyncio.get_running_loop().time() - began < 50


async def test_a_long_queue_is_told_as_such(api: Service) -> None:
    items = [{"model": "scripted", "content": str(n)} for n in range(700)]
    ids = [
        item["id"]
        for _ in range(2)
        for item in (await api.client.post("/results/", json=items)).json()
    ]
    assert await position(api, ids[999]) == (1000, None)
    assert await position(api, ids[1000]) == ("1000+", None)
    answer = await get(api, ids[-1])
    assert answer.json()["queue_position"] == "1000+"
    assert answer.headers["retry-after"] == "30"


async def test_running_and_ended_results(service: Service) -> None:
    accepted = await send(service, SLOW)
    await until_running(service, accepted["id"])
    for query in ("", "?partial=true", "?wait=0.1"):
        answer = await get(service, accepted["id"], query)
        result = answer.json()
        assert (result["queue_position"], result["estimated_wait_seconds"]) == (0, 0.0)
        assert answer.headers["retry-after"] == "1"
    (listed,) = (await service.client.get("/results/")).json()
    assert (listed["queue_position"], listed["estimated_wait_seconds"]) == (None, None)
    cancelled = await service.client.post(f"/results/{accepted['id']}/cancel")
    assert cancelled.json()["queue_position"] is None
    answer = await get(service, accepted["id"])
    assert (answer.json()["queue_position"], answer.json()["estimated_wait_seconds"]) == (
        None,
        None,
    )
    assert "retry-after" not in answer.headers


@pytest.mark.trial
async def test_a_worker_tells_what_it_finishes(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Measured by the worker, reported with its lease, and so part of the estimated wait."""
    one_slot = settings.model_copy(update={"worker_slots": 1, "lease_seconds": 5.0})
    async with run_service(one_slot, with_worker=True) as service:
        for _ in range(10):
            await finish(service, "quick {{chunks=2 delay_ms=50}}")

        async def rate() -> float:
            load = await connection.fetchval("SELECT load FROM workers WHERE dead_at IS NULL")
            return float(orjson.loads(load).get("scripted", {}).get("results_per_second", 0))

        assert 0.5 < await until(rate) < 50
        running = await send(service, SLOW)
        await until_running(service, running["id"])
        waiting = [await send(service, str(n)) for n in range(3)]
        place, wait = await position(service, waiting[-1]["id"])
        assert place == 3
        assert wait == pytest.approx(3 / await rate(), rel=0.5)
        await service.client.post("/results/cancel", params={"model_name": "scripted"})


async def test_models_wait_in_queues_of_their_own(
    api: Service, connection: asyncpg.Connection
) -> None:
    accepted = [await send(api, str(n)) for n in range(4)]
    await connection.execute(
        "UPDATE results SET model_name = 'other' WHERE id = ANY($1::uuid[])",
        [accepted[0]["id"], accepted[2]["id"]],
    )
    places = [(await position(api, one["id"]))[0] for one in accepted]
    assert places == [1, 1, 2, 2]
    assert (await read(api, accepted[2]["id"]))["queue_position"] == 2


@pytest.mark.parametrize(
    ("estimate", "seconds"),
    [
        (Estimate(None, None), 1),
        (Estimate(0, 0.0), 1),
        (Estimate(1, 0.1), 1),
        (Estimate(9, 4.2), 5),
        (Estimate(999, 4000.0), 30),
        (Estimate(7, None), 7),
        (Estimate(700, None), 30),
        (Estimate("1000+", None), 30),
    ],
)
def test_the_poll_hint_grows_with_the_wait(estimate: Estimate, seconds: int) -> None:
    assert estimate.poll_seconds == seconds
