"""Usage: each ended result is in the ledger once, after deaths, deletions and concurrent indexers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from app.core.database import Database
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer
from app.results.retention.retention import Retention
from app.results.usage import ledger
from tests.conftest import Service, connect, migrate
from tests.integration.support import finish, send, until, until_running
from tests.postgres import PostgresServer

RESULTS = """
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at, state, output,
  started_at, finished_at, prompt_tokens, completion_tokens, token_id, error_code, error_message,
  error_retryable)
SELECT id, $3, $2, $4, '{}', now(), CASE WHEN $6::text IS NULL THEN 'completed' ELSE 'failed' END, 'text',
  now() - interval '2.000001 s', now(), 2, 3, $5, $6, $6, CASE WHEN $6::text IS NOT NULL THEN false END
FROM unnest($1::uuid[]) AS i(id)
"""
# As `ledger.py` defines them, by other means: one row of `results` at a time, without grouping.
EXPECTED = """
SELECT team_id, to_char(finished_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day,
  coalesce(token_id, '') AS token_id, model_name, coalesce(error_code, 'completed') AS ended_as,
  count(*)::int AS results, coalesce(sum(prompt_tokens), 0)::int AS prompt_tokens,
  coalesce(sum(completion_tokens), 0)::int AS completion_tokens
FROM results WHERE state <> 'pending' GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
"""
LEDGER = """
SELECT team_id, day::text, token_id, model_name, ended_as, sum(results)::int AS results,
  sum(prompt_tokens)::int AS prompt_tokens, sum(completion_tokens)::int AS completion_tokens
FROM (SELECT * FROM usage_days UNION ALL
  SELECT team_id, day, token_id, model_name, adapter, ended_as, results, prompt_tokens,
    cached_prompt_tokens, completion_tokens, reasoning_tokens, engine_microseconds
  FROM usage_entries) u
GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
"""
TIME = """SELECT coalesce(sum(engine_microseconds), 0)::bigint FROM (
  SELECT engine_microseconds FROM usage_days UNION ALL SELECT engine_microseconds FROM usage_entries) u"""


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    async with Database(settings, "test") as database:
        yield database


@pytest.fixture
def indexer(database: Database, settings: Settings) -> ResultIndexer:
    """No indexer runs except the test."""
    return ResultIndexer(database, QueueDepth(database, settings), settings)


async def add(
    connection: asyncpg.Connection, count: int = 1, *, team: str = "default", model: str = "m",
    key: str | None = "k", code: str | None = None, ended: bool = True,
) -> Sequence[UUID]:  # fmt: skip
    """Ended results of one context, as their last statement leaves them."""
    context_id, ids = new_id(), [new_id() for _ in range(count)]
    await connection.execute(
        "INSERT INTO contexts (id, team_id, content) VALUES ($1, $2, 'p')", context_id, team
    )
    await connection.execute(RESULTS, ids, context_id, team, model, key, code)
    if ended:
        await connection.execute(
            "INSERT INTO undigested_results (result_id) SELECT unnest($1::uuid[])", ids
        )
    return ids


async def total(connection: asyncpg.Connection) -> int:
    return sum(row["results"] for row in await connection.fetch(LEDGER))


async def assert_sums(connection: asyncpg.Connection) -> None:
    assert await connection.fetch(LEDGER) == await connection.fetch(EXPECTED)


async def mixed(connection: asyncpg.Connection) -> None:
    for team in ("red", "blue"):
        for key in ("k1", None):
            await add(connection, 30, team=team, key=key)
            await add(connection, 20, team=team, key=key, model="n", code="cancelled")


async def test_sums_equal_the_rows_with_several_indexers_walks_and_compactions(
    indexer: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    for _ in range(4):
        await mixed(connection)
    others = [Database(settings, "test") for _ in range(3)]
    for other in others:
        await other.__aenter__()
    indexers = [indexer, *(ResultIndexer(one, indexer._depth, settings) for one in others)]

    async def is_done() -> bool:
        for one in indexers:
            one._place, one._max_rows = 0, 70
        await connection.execute("UPDATE digest_state SET resumes_at = now() - interval '1 h'")
        await asyncio.gather(
            *(one.index() for one in indexers),
            *(one.index_older() for one in indexers),
            *(ledger.compact(one) for one in others),
        )
        return not await connection.fetchval("SELECT count(*) FROM undigested_results")

    await until(is_done)
    await assert_sums(connection)
    await ledger.compact(others[0])
    assert await connection.fetchval("SELECT count(*) FROM usage_entries") == 0
    assert await connection.fetchval("SELECT count(*) FROM usage_days") == 8
    await assert_sums(connection)
    assert await connection.fetchval(TIME) == 800 * 2_000_001
    for other in others:
        await other.__aexit__()


async def test_results_that_are_deleted_before_they_are_indexed_are_in_the_ledger(
    indexer: ResultIndexer, connection: asyncpg.Connection, api: Service
) -> None:
    """By their client, with their context, and by retention; and each of them once."""
    for is_indexed in (False, True):
        first, second, third = [(await add(connection))[0] for _ in range(3)]
        if is_indexed:
            await indexer.index()
        assert (await api.client.delete(f"/results/{first}")).status_code == 204
        context = await connection.fetchval("SELECT context_id FROM results WHERE id = $1", second)
        assert (await api.client.delete(f"/contexts/{context}")).status_code == 204
        # A process of the version before has indexed it, without the ledger.
        await connection.execute(
            "INSERT INTO result_search (result_id, team_id) VALUES ($1, 'default') ON CONFLICT DO NOTHING",
            third,
        )
        await connection.execute("UPDATE results SET expires_at = now() - interval '1 s'")
        await connection.execute("UPDATE retention_state SET looked_at = NULL")
        assert await Retention(api.services.database, api.services.settings, share=1).look()
        assert await connection.fetchval("SELECT count(*) FROM results") == 0
    await indexer.index()
    assert await total(connection) == 6
    assert await connection.fetchval("SELECT count(*) FROM undigested_results") == 0


async def test_pending_results_that_are_deleted_count_with_their_stored_text(
    connection: asyncpg.Connection, service: Service
) -> None:
    """By their client and with their context; results that have not begun are not counted."""
    stored = "SELECT max(completion_tokens) FROM result_chunks"
    for kind in ("results", "contexts"):
        running = await send(service, "two {{chunks=1000 delay_ms=20}}", model="scripted")
        await until_running(service, running["id"])
        await until(lambda: connection.fetchval(stored))
        identifier = running["id"] if kind == "results" else running["context_id"]
        answer = await service.client.delete(f"/{kind}/{identifier}?force=true")
        assert answer.status_code == 204
    queued = await add(connection)
    await connection.execute(
        """UPDATE results SET state = 'pending', finished_at = NULL, not_before = 'infinity'
           WHERE id = ANY($1)""",
        queued,
    )
    await ledger.add_deleted(connection, queued)
    rows = [dict(row) for row in await connection.fetch(LEDGER)]
    assert [(row["ended_as"], row["results"]) for row in rows] == [("deleted", 2)]
    assert rows[0]["completion_tokens"] > 0
    assert rows[0]["prompt_tokens"] > 0
    assert await connection.fetchval(TIME) > 0


async def test_a_deletion_and_an_indexer_at_the_same_time_add_a_result_once(
    indexer: ResultIndexer, connection: asyncpg.Connection, api: Service
) -> None:
    ids = [(await add(connection))[0] for _ in range(40)]

    async def index() -> None:
        for _ in range(20):
            indexer._place = 0
            await indexer.index()

    async def walk() -> None:
        for _ in range(20):
            await connection.execute("UPDATE digest_state SET resumes_at = now() - interval '1 h'")
            await indexer.index_older()

    async def delete(result_id: UUID) -> None:
        assert (await api.client.delete(f"/results/{result_id}")).status_code == 204

    await asyncio.gather(*map(delete, ids), index(), walk())
    await indexer.index()
    assert await total(connection) == 40


async def test_results_that_an_older_version_indexed_are_added_by_the_walk(
    indexer: ResultIndexer, connection: asyncpg.Connection
) -> None:
    await mixed(connection)
    await connection.execute(
        """INSERT INTO result_search (result_id, team_id) SELECT id, team_id FROM results;
           DELETE FROM undigested_results"""
    )
    await add(connection, 5, ended=False)  # never indexed
    while await indexer.index_older():
        await connection.execute("UPDATE digest_state SET resumes_at = now()")
    await assert_sums(connection)
    counted = "SELECT sum(results) FROM minute_stats"
    assert await connection.fetchval(counted) == 5  # the others were counted by that version
    await connection.execute(
        "UPDATE digest_state SET resumes_at = now(), digested_from = 'ffffffff-ffff-ffff-ffff-ffffffffffff'"
    )
    await indexer.index_older()
    await assert_sums(connection)


async def test_two_that_settle_a_result_at_the_same_time_add_it_once(
    connection: asyncpg.Connection, settings: Settings
) -> None:
    """Results that an older version has indexed, and others; the second waits for the first."""
    ids = [*await add(connection, 3), *await add(connection, 3)]
    await connection.execute(
        "INSERT INTO result_search (result_id, team_id) SELECT unnest($1::uuid[]), 'default'",
        ids[:3],
    )
    other = await connect(settings)
    waiting = "SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"
    pid = await other.fetchval("SELECT pg_backend_pid()")
    async with connection.transaction():
        await ledger.settle(connection, ids)
        second = asyncio.create_task(ledger.settle(other, ids))
        await until(lambda: connection.fetch(waiting, pid))
    await second
    await other.close()
    await assert_sums(connection)


HISTORY = """[
  {"attempt": 1, "started_at": "2026-11-25T10:00:00.5+00:00", "ended_at": "2026-11-25T10:00:02+00:00"},
  {"attempt": 2, "started_at": "2026-11-25T10:00:09+00:00", "ended_at": "2026-11-25T10:00:02+00:00"},
  {"attempt": 3, "started_at": null, "ended_at": "2026-11-25T10:00:02+00:00"},
  {"attempt": 4, "started_at": "2026-11-25T11:00:00+00:00", "ended_at": "2026-11-25T11:00:01+00:00"}
]"""


@pytest.mark.parametrize(
    ("started", "microseconds"),
    [
        ("now() - interval '2 s'", 3_500_000),  # its last attempt is in the history, too
        ("NULL", 2_500_000),  # it ended in the queue
        ("now() + interval '2 s'", 1_500_000),  # the clock was set back
    ],
)
async def test_engine_time_has_lost_attempts_and_is_never_negative(
    indexer: ResultIndexer, connection: asyncpg.Connection, started: str, microseconds: int
) -> None:
    await add(connection)
    await connection.execute(
        f"UPDATE results SET attempt = 4, started_at = {started}, finished_at = now(), attempt_history = $1",
        HISTORY,
    )
    await indexer.index()
    assert await connection.fetchval(TIME) == microseconds


async def test_results_of_the_service_are_in_the_ledger_with_their_tokens(
    service: Service, connection: asyncpg.Connection
) -> None:
    done = await finish(service, "one {{chunks=3}}")
    cancelled = await send(service, "two {{chunks=100 delay_ms=500}}", model="scripted")
    await service.client.post(f"/results/{cancelled['id']}/cancel")

    async def counted() -> bool:
        return await total(connection) == 2

    await until(counted)
    await assert_sums(connection)
    answer = await service.client.get("/usage")
    assert answer.json()["total"]["completed"] == answer.json()["total"]["cancelled"] == 1
    (row,) = answer.json()["rows"]
    assert row["model"] == "scripted"
    assert row["completion_tokens"] >= done["usage"]["completion_tokens"] == 3
    assert 0 < row["engine_seconds"] < 60


async def test_days_beyond_their_retention_are_deleted_and_others_stay(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    for age in (40, 42):
        await connection.execute(
            """INSERT INTO usage_days
               SELECT 'red', (now() AT TIME ZONE 'UTC')::date - $1::int, n::text, 'm', '', 'completed', 1, 0, 0,
                 0, 0, 0 FROM generate_series(1, 600) n""",
            age,
        )
    changed = settings.model_copy(update={"usage_retention_days": 41})
    async with Database(changed, "test") as database:
        assert await Retention(database, changed, share=1).look()
    assert await connection.fetchval("SELECT count(*) FROM usage_days") == 600


def test_the_migration_adds_the_results_that_are_there_and_goes_back(
    postgres_server: PostgresServer, settings: Settings
) -> None:
    async def work(statement: str) -> Any:
        connection = await connect(settings)
        try:
            return await connection.fetch(statement)
        finally:
            await connection.close()

    async def walk() -> None:
        async with Database(settings, "test") as database:
            indexer = ResultIndexer(database, QueueDepth(database, settings), settings)
            while await indexer.index_older():
                await database.fetch("UPDATE digest_state SET resumes_at = now()")

    migrate(settings, "0018", down=True)
    context = f"'{new_id()}'"
    asyncio.run(work(f"INSERT INTO contexts (id, team_id, content) VALUES ({context}, 'red', 'p')"))
    for _ in range(3):
        identifier = f"'{new_id()}'"
        asyncio.run(
            work(
                "INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at, state,"
                f" output, finished_at, completion_tokens) VALUES ({identifier}, 'red', {context}, 'm',"
                " '{}', now(), 'completed', 'text', now(), 4)"
            )
        )
        asyncio.run(work(f"INSERT INTO result_search VALUES ({identifier}, 'red', NULL)"))
    asyncio.run(work("UPDATE digest_state SET passes_left = 0"))
    migrate(settings)
    asyncio.run(walk())
    assert asyncio.run(work(LEDGER)) == asyncio.run(work(EXPECTED)) != []
    with pytest.raises(Exception, match="--force"):
        migrate(settings, "0018", down=True)
    migrate(settings, "0018", down=True, force=True)
    assert asyncio.run(work("SELECT count(*)::int FROM results"))[0]["count"] == 3
    migrate(settings)
    asyncio.run(walk())
    assert asyncio.run(work(LEDGER)) == asyncio.run(work(EXPECTED)) != []
