"""Counts of waiting and running results: by model, over all workers that live."""

import asyncio

import asyncpg
import orjson
import pytest

from app.core.database import Database
from app.core.errors import QueueFullError
from app.core.settings import Settings
from app.queue.depth import ModelLoad, QueueDepth
from tests.integration.queue.queue_bench import MODEL, Bench


async def report(
    bench: Bench, load: dict[str, tuple[int, float]], lease_seconds: float = 60
) -> None:
    """Enter a worker with a load: running results and tokens per second, by model."""
    worker = await bench.worker(lease_seconds)
    values = {
        model: {"running": running, "tokens_per_second": rate}
        for model, (running, rate) in load.items()
    }
    await bench.connection.execute(
        "UPDATE workers SET load = $2::jsonb WHERE id = $1", worker, orjson.dumps(values).decode()
    )


async def test_loads_of_living_workers_add_up(bench: Bench) -> None:
    await report(bench, {MODEL: (3, 10.0), "other": (1, 5.0)})
    await report(bench, {MODEL: (4, 2.5)})
    await report(bench, {"infini-gram/pile": (2, 0.0)})
    await report(bench, {MODEL: (50, 50.0)}, lease_seconds=-1)
    await bench.connection.execute(
        "UPDATE workers SET dead_at = now(), lease_expires_at = now() + interval '1 hour'"
        " WHERE lease_expires_at < now()"
    )
    await report(bench, {MODEL: (70, 70.0)}, lease_seconds=-1)
    await bench.add(2)
    (running,) = await bench.add(1, model_name="other")
    assert [one.id for one in await bench.claim(await bench.worker(), model="other")] == [running]

    depth = QueueDepth(bench.database, bench.settings)
    assert await depth.by_model() == {
        MODEL: ModelLoad(queued=2, running=7, tokens_per_second=12.5),
        "other": ModelLoad(queued=0, running=1, tokens_per_second=5.0),
        "infini-gram/pile": ModelLoad(queued=0, running=2, tokens_per_second=0.0),
    }
    # One worker without a load was entered for the claim.
    assert await depth.workers() == {"generation": 3, "attribution": 1}


async def test_the_oldest_of_each_model_is_found_behind_any_head(bench: Bench) -> None:
    """Heads are by model, team and priority; running and ended results do not count."""
    expected = {}
    for model, ages in {
        MODEL: (10, 500, 30),
        "n": (5, 900, 40),
        "o": (70, 60, 800),
        "p": (700, 50, 30),
    }.items():
        rows = [
            *await bench.add(1, model_name=model, priority=1),
            *await bench.add(1, model_name=model, priority=-1),
            *await bench.add(1, model_name=model, team_id="team"),
        ]
        for row, age in zip(rows, ages, strict=True):
            await age_by(bench, row, age)
        expected[model] = max(ages)
    (running,) = await bench.add(1, model_name="running")
    await age_by(bench, running, 3000)
    assert await bench.claim(await bench.worker(), model="running")

    found = await QueueDepth(bench.database, bench.settings).oldest_seconds()
    assert found.keys() == expected.keys()
    assert {model: seconds // 300 * 300 for model, seconds in found.items()} == {
        MODEL: 300, "n": 900, "o": 600, "p": 600
    }  # fmt: skip


async def age_by(bench: Bench, result_id: object, seconds: int) -> None:
    """Give a result the id of one that was accepted so long ago."""
    await bench.connection.execute(
        "UPDATE results SET id = (lpad(to_hex((('x' || left(replace(id::text, '-', ''), 12))::bit(48)"
        "::bigint - $2 * 1000)), 12, '0') || right(replace(id::text, '-', ''), 20))::uuid"
        " WHERE id = $1",
        result_id,
        seconds,
    )


async def test_what_was_accepted_since_the_count_is_added(bench: Bench) -> None:
    settings = bench.settings.model_copy(update={"max_queued": 3})
    depth = QueueDepth(bench.database, settings)
    await bench.add(1)
    await depth.admit(1)
    await depth.admit(1)
    with pytest.raises(QueueFullError, match="1 results are queued"):
        await depth.admit(1)
    depth._snapshot.expires = 0.0  # counted again: nothing of it was stored
    await depth.admit(2)


class Counted(Database):
    """Counts the queries."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, "test")
        self.queries = 0

    async def fetch(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        self.queries += 1
        return await super().fetch(query, *arguments)


async def test_concurrent_looks_share_one_count(bench: Bench) -> None:
    """Those that come while it is made go on with the count before."""
    await bench.add(2)
    database = Counted(bench.settings)
    async with database:
        depth = QueueDepth(database, bench.settings)
        loads = await asyncio.gather(*(depth.by_model() for _ in range(5)))
        assert database.queries == 2  # of what waits, and of what runs
        ages = await asyncio.gather(*(depth.oldest_seconds() for _ in range(5)))
        assert database.queries == 3
    assert [set(load) for load in loads] == [{MODEL}, *[set()] * 4]
    assert [set(age) for age in ages] == [{MODEL}, *[set()] * 4]
