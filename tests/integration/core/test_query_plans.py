"""The statements of the hot path on 100,000 rows: each reads by its index, and no more than it needs.

Every statement is the one that the service sent: recorded, then explained with the settings of the
service's own connections, generic plans included.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Self
from uuid import UUID

import orjson
import pytest
import pytest_asyncio

from app.batches.files import FileStore
from app.batches.rows import LineOutcome, NewBatch
from app.batches.store import BatchStore
from app.batches.work import BatchWork
from app.core.database import Connection, Database
from app.core.errors import ConflictError
from app.core.ids import created_at, new_id
from app.core.settings import Settings
from app.queue.admission import Admission
from app.queue.budgets import BudgetGuard
from app.queue.claim import claim_within_limits, owned_results
from app.queue.depth import QueueDepth
from app.queue.enqueue import NewContext, NewResult
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.idempotency import IdempotencyKeys, NewKey
from app.queue.job_queue import JobQueue
from app.queue.position import QueuePositions
from app.queue.progress import Chunk
from app.queue.team_limits import Limits, RunningLimits, TeamLimits
from app.results.contexts import ContextStore
from app.results.export import ResultExport
from app.results.indexer import ResultIndexer
from app.results.pages import ResultFilter
from app.results.retention.erasure import Erasure
from app.results.retention.retention import Retention
from app.results.stats.history import HistoryStore
from app.results.stats.system import SystemStore
from app.results.store import ResultStore
from app.webhooks.outbox import State, Verdict, WebhookOutbox
from tests.claims import claim_all
from tests.conftest import connect
from tests.integration.support import fresh_database
from tests.postgres import PostgresServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEAM = "default"
ROWS = 100_000
QUEUED = 4_000
RUNNING = 300
# The limit of a statement's reading, in rows of any node: far below the table, above every batch.
FEW = 2_500
# Two filters at once: the pending or the failed results at most, never the table.
MOST_PENDING = 5_200
TABLES = {
    "results", "contexts", "result_chunks", "webhook_deliveries", "idempotency_keys", "batches",
    "batch_lines", "files", "file_parts", "undigested_results", "result_search", "minute_stats",
    "queue_samples", "result_tags",
}  # fmt: skip
BATCHES, LINES = 2_000, 50_000
# Lines of the one large batch: those before are done, those behind wait.
SENT = range(30_000, 30_100)


class RecordingDatabase(Database):
    """The service's database, which records each statement."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, "test")
        self.statements: list[tuple[str, tuple[Any, ...]]] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with super().connection() as connection:
            with connection.query_logger(self._record):
                yield connection

    def _record(self, logged: Any) -> None:
        if logged.args:
            self.statements.append((logged.query, tuple(logged.args)))


@dataclass
class Table:
    """A full table, and some ids in it."""

    database: RecordingDatabase
    queue: JobQueue
    results: ResultStore
    contexts: ContextStore
    depth: QueueDepth
    outbox: WebhookOutbox
    positions: QueuePositions
    keys: IdempotencyKeys
    settings: Settings
    worker: UUID
    context: UUID
    ids: list[UUID]
    running: list[UUID]
    batch: UUID


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def table(postgres_server: PostgresServer, template: str) -> AsyncIterator[Table]:
    async with fresh_database(postgres_server, template, None) as settings:
        database = RecordingDatabase(settings)
        await database.__aenter__()
        queue = JobQueue(database, settings)
        worker = new_id()
        connection = await connect(settings)  # the service's own are for statements of a moment
        context, ids, running = await fill(connection, worker)
        batch = await fill_batches(connection, ids)
        await connection.close()
        yield Table(
            database, queue, ResultStore(database, queue, settings),
            ContextStore(database, queue, settings), QueueDepth(database, settings),
            WebhookOutbox(database, settings),
            QueuePositions(database), IdempotencyKeys(database, settings), settings, worker,
            context, ids, running, batch,
        )  # fmt: skip
        await database.__aexit__()


async def fill(connection: Connection, worker: UUID) -> tuple[UUID, list[UUID], list[UUID]]:
    """Ten thousand contexts, a hundred thousand results: most completed, some in each other state."""
    chance = random.Random(1)  # noqa: S311 - the same rows each time
    contexts = [new_id() for _ in range(ROWS // 10)]
    await connection.copy_records_to_table(
        "contexts", columns=["id", "content"], records=[(c, "a prompt") for c in contexts]
    )
    now = await connection.fetchval("SELECT now()")
    ids = [new_id() for _ in range(ROWS)]
    open_places = set(chance.sample(range(ROWS), QUEUED + RUNNING))
    running_places = set(chance.sample(sorted(open_places), RUNNING))
    records = []
    for place, identifier in enumerate(ids):
        model = "rare" if place % 1000 == 0 else f"model-{place % 3}"
        is_open, is_running = place in open_places, place in running_places
        is_failed = not is_open and place % 20 == 0
        state = "pending" if is_open else "failed" if is_failed else "completed"
        code = ("rare_code" if place % 2000 == 0 else "model_error") if is_failed else None
        records.append((
            identifier, contexts[place // 10], model, "{}", now + timedelta(hours=1),
            state, worker if is_running or not is_open else None, 0 if not is_running else 1,
            None if is_open else now, None if is_open else "text " * 10, code,
            "why" if code else None, place % 40 == 0 if code else None,
            '{"run": "rare"}' if place % 1000 == 0 else '{"run": "busy"}' if place % 3 else "{}",
        ))  # fmt: skip
    await connection.copy_records_to_table(
        "results",
        columns=[
            "id",
            "context_id",
            "model_name",
            "parameters",
            "deadline_at",
            "state",
            "worker_id",
            "attempt",
            "finished_at",
            "output",
            "error_code",
            "error_message",
            "error_retryable",
            "metadata",
        ],
        records=records,
    )
    await connection.execute(
        "INSERT INTO workers (id, host, pid, lease_expires_at)"
        " VALUES ($1, 'h', 1, now() + interval '1 h')",
        worker,
    )
    running = [ids[place] for place in sorted(running_places)]
    await connection.execute("UPDATE results SET engine_deaths = 2 WHERE id = $1", running[0])
    await connection.execute(
        "UPDATE results SET deadline_at = now() - interval '1 s' WHERE id = ANY($1)",
        [ids[place] for place in sorted(open_places - running_places)[:50]],
    )
    await connection.execute(
        """INSERT INTO webhook_deliveries (result_id, team_id, url, state, finished_at)
           SELECT id, team_id, 'http://hook.example/', CASE n % 20 WHEN 0 THEN 'pending'
             WHEN 1 THEN 'failed' ELSE 'delivered' END, CASE n % 20 WHEN 0 THEN NULL ELSE now() END
           FROM (SELECT id, team_id, row_number() OVER (ORDER BY id) AS n FROM results
                 WHERE state <> 'pending') r"""
    )
    # The keys of every fifth result; a few have expired.
    await connection.execute(
        """INSERT INTO idempotency_keys
           SELECT 'default', 'key ' || id, 'hash', id, now() + interval '1 h'
             - CASE WHEN get_byte(uuid_send(id), 15) = 7 THEN interval '1 day' ELSE '0' END
           FROM unnest($1::uuid[]) AS i(id)""",
        ids[::5],
    )
    for name in (
        "results",
        "contexts",
        "workers",
        "result_chunks",
        "webhook_deliveries",
        "idempotency_keys",
        "result_tags",
    ):
        await connection.execute(f"ANALYZE {name}")
    return contexts[5], ids, running


async def fill_batches(connection: Connection, ids: list[UUID]) -> UUID:
    """Batches that have ended, a few that have not, one of them large; files; texts to erase."""
    batches = [new_id() for _ in range(BATCHES)]
    await connection.execute(
        """INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state,
             ended_at, expires_at)
           SELECT id, 'default', '/v1/completions', id, '24h',
             CASE WHEN n > $2 THEN 'in_progress' ELSE 'completed' END,
             CASE WHEN n > $2 THEN NULL ELSE now() END, now() + interval '1 day'
           FROM unnest($1::uuid[]) WITH ORDINALITY AS i(id, n)""",
        batches,
        BATCHES - 10,
    )
    await connection.execute(
        """INSERT INTO batch_lines (batch_id, line, custom_id, state, body, result_ids, outcome,
             is_completed)
           SELECT $1, n, n, CASE WHEN n < $3 THEN 'done' WHEN n <= $4 THEN 'sent' ELSE 'waiting' END,
             CASE WHEN n >= $3 THEN '{}' END, CASE WHEN n <= $4 THEN ARRAY[$5::uuid] END,
             CASE WHEN n < $3 THEN '{}' END, CASE WHEN n < $3 THEN true END
           FROM generate_series(1, $2::int) AS n""",
        batches[-1],
        LINES,
        SENT.start,
        SENT.stop,
        ids[0],
    )
    await connection.execute(
        """INSERT INTO files (id, team_id, purpose, filename, size, expires_at)
           SELECT id, 'default', 'batch', 'f', CASE WHEN n % 100 <> 0 THEN 9 END,
             CASE WHEN n % 50 = 1 THEN now() END
           FROM unnest($1::uuid[]) WITH ORDINALITY AS i(id, n)""",
        ids[:10_000],
    )
    await connection.execute(
        "UPDATE results SET store = false WHERE id = ANY($1::uuid[])", ids[:2_000:10]
    )
    for name in ("batches", "batch_lines", "files", "results"):
        await connection.execute(f"ANALYZE {name}")
    return batches[-1]


def literal(value: Any) -> str:
    """An argument as EXECUTE takes it: text that PostgreSQL reads as the parameter's type."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    if isinstance(value, (list, tuple)):
        members = ("NULL" if v is None else '"' + str(v).replace('"', '\\"') + '"' for v in value)
        return "'{" + ",".join(members).replace("'", "''") + "}'"
    return "'" + str(value).replace("'", "''") + "'"


async def explain(table: Table, query: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The plan as it ran, undone afterwards."""
    async with Database.connection(table.database) as connection:
        assert await connection.fetchval("SHOW plan_cache_mode") == "force_generic_plan"
        transaction = connection.transaction()
        await transaction.start()
        try:
            await connection.execute(f"PREPARE explained AS {query}")
            rows = await connection.fetch(
                "EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE explained"
                f"({', '.join(map(literal, arguments))})"
            )
        finally:
            await transaction.rollback()
            await connection.execute("DEALLOCATE explained")
    plan: dict[str, Any] = orjson.loads(rows[0][0])[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


async def check(
    table: Table, work: Awaitable[Any], *indexes: str, few: int = FEW
) -> list[dict[str, Any]]:
    """Do the work; each of its statements must read little, and the results by these indexes."""
    table.database.statements.clear()
    await work
    statements = list(table.database.statements)
    assert statements
    plans = [await explain(table, query, arguments) for query, arguments in statements]
    used = set()
    for plan in plans:
        for node in nodes(plan):
            read = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node[
                "Actual Loops"
            ]
            assert read <= few, f"{read:.0f} rows: {node}"
            if node.get("Relation Name") in TABLES and node["Node Type"] != "ModifyTable":
                assert node["Node Type"] not in ("Seq Scan", "Parallel Seq Scan"), node
            if node.get("Relation Name") in TABLES or "Bitmap Index" in node["Node Type"]:
                used.add(node.get("Index Name"))
    used.discard(None)
    assert set(indexes) <= used, used
    return plans


async def test_claim(table: Table) -> None:
    free = {"model-0": 50, "rare": 50}
    await check(table, claim_all(table.queue, table.worker, free), "ix_results_queue", "pk_results")


async def test_claim_within_limits(table: Table) -> None:
    limits = RunningLimits(None, {TEAM: 320, "other": 3})

    async def claim() -> None:
        async with table.database.connection() as connection:
            await claim_within_limits(
                *(connection, table.worker, "model-0", 50, limits), continues=True
            )

    await check(table, claim(), "ix_results_queue_team", "ix_results_worker_id", "pk_results")


async def test_admission(table: Table) -> None:
    limits = TeamLimits(table.database, table.settings)
    admission = Admission(
        table.database, table.depth, limits, BudgetGuard(table.database, "USD"), table.settings
    )
    context = NewContext(new_id(), TEAM, "a prompt", None, "{}")
    result = NewResult(
        new_id(), TEAM, context.id, "model-0", "{}", 60.0, new_context=context, tokens=10,
        limits=Limits(max_queued=2_000, requests_per_minute=100, tokens_per_minute=1_000),
    )  # fmt: skip

    async def admit() -> None:
        async with admission.admitted([result]):
            pass

    depth = table.depth._snapshot
    table.depth._snapshot = replace(depth, expires=float("inf"))  # counted apart from this
    await check(table, admit(), "ix_results_queue_team")
    table.depth._snapshot = depth


async def test_claim_of_suspects(table: Table) -> None:
    await check(
        table, table.queue.claim_suspects(table.worker, ["model-0", "model-1", "model-2", "rare"]),
        "ix_results_suspects",
    )  # fmt: skip


async def test_owned(table: Table) -> None:
    owned = table.database.run(lambda connection: owned_results(connection, table.worker))
    await check(table, owned, "ix_results_worker_id")


async def test_append_and_end(table: Table) -> None:
    chunks = [Chunk(identifier, 1, 0, "text", 1, 1) for identifier in table.running[:100]]
    await check(table, table.queue.append(table.worker, chunks), "pk_results")
    lane = table.queue.end_batcher(table.worker, 5.0)
    ends = [AttemptEnd(i, 1, AttemptOutcome.COMPLETED, output="x") for i in table.running[100:200]]
    await check(table, lane.submit_all(ends), "pk_results")


async def test_append_and_end_in_a_young_table(
    table: Table, postgres_server: PostgresServer, template: str
) -> None:
    """If there are no statistics, a worker's rows look few: they are not read for each named result."""
    worker, context, ids = new_id(), new_id(), [new_id() for _ in range(RUNNING)]
    async with (
        fresh_database(postgres_server, template, None) as settings,
        RecordingDatabase(settings) as database,
    ):
        async with Database.connection(database) as connection:
            await connection.execute(
                "INSERT INTO contexts (id, content) VALUES ($1, 'a prompt')", context
            )
            await connection.execute(
                """INSERT INTO results (id, context_id, model_name, parameters, deadline_at,
                                        worker_id, attempt, started_at)
                   SELECT i, $2, 'm', '{}', now() + interval '1 h', $3, 1, now()
                   FROM unnest($1::uuid[]) i""",
                ids,
                context,
                worker,
            )
        young = replace(table, database=database, queue=JobQueue(database, settings))
        chunks = [Chunk(identifier, 1, 0, "text", 1, 1) for identifier in ids[:10]]
        await check(young, young.queue.append(worker, chunks), "pk_results", few=1000)
        lane = young.queue.end_batcher(worker, 5.0)
        ends = [AttemptEnd(i, 1, AttemptOutcome.COMPLETED, output="x") for i in ids[:10]]
        await check(young, lane.submit_all(ends), "pk_results", few=1000)


async def test_rescue_and_retire(table: Table) -> None:
    await check(table, table.queue.release([new_id()]), "ix_results_worker_id")
    dead = new_id()
    async with Database.connection(table.database) as connection:
        await connection.execute(
            "INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)"
            " VALUES ($1, 'h', 1, now(), now())",
            dead,
        )
    await check(table, table.queue.rescue(0.001))
    assert "ix_results_worker_id" in await explain_unprepared(table, table.queue.rescue(0.001))
    await check(table, table.queue.retire(dead), "ix_results_worker_id")


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_enqueue(table: Table, is_keyed: bool) -> None:
    results = []
    for n in range(64):
        context = NewContext(new_id(), TEAM, "a prompt", None, "{}") if n % 2 else None
        key = NewKey(f"new {n // 3}", b"hash", 60.0) if is_keyed and n % 4 else None
        results.append(
            NewResult(
                new_id(), TEAM, context.id if context else table.context, "model-0", "{}", 60.0,
                new_context=context, key=key,
            )
        )  # fmt: skip
    plans = await check(table, table.queue.enqueue(results))
    names = {node.get("Relation Name") for plan in plans for node in nodes(plan)}
    assert ("idempotency_keys" in names) is is_keyed


@pytest.mark.parametrize(
    ("done", "is_analyzed", "queued"),
    [(0, False, 1_000), (0, False, 15_000), (20_000, True, 1_000), (20_000, True, 15_000)],
)
async def test_a_burst_of_which_statistics_know_nothing(
    table: Table,
    postgres_server: PostgresServer,
    template: str,
    done: int,
    is_analyzed: bool,
    queued: int,
) -> None:
    """They were made while nothing waited, or never: the queue is read by its own indexes all the
    same, and no more of it than is needed.
    """
    async with (
        fresh_database(postgres_server, template, None) as settings,
        RecordingDatabase(settings) as database,
    ):
        worker = new_id()
        async with Database.connection(database) as connection:
            await connection.execute(
                "INSERT INTO workers (id, host, pid, lease_expires_at)"
                " VALUES ($1, 'h', 1, now() + interval '1 h')",
                worker,
            )
            await connection.execute("ALTER TABLE results SET (autovacuum_enabled = off)")
            await add_results(connection, done, "completed")
            if is_analyzed:
                await connection.execute("ANALYZE results")
            await add_results(connection, queued, "pending")
        young = replace(
            table, database=database, queue=JobQueue(database, settings),
            positions=QueuePositions(database), depth=QueueDepth(database, settings),
        )  # fmt: skip
        results = []
        for _ in range(8):
            context = NewContext(new_id(), TEAM, "a prompt", None, "{}")
            results.append(
                NewResult(new_id(), TEAM, context.id, "m", "{}", 60.0, new_context=context)
            )
        await check(young, young.queue.enqueue(results), "ix_results_queue", few=900)
        claims = await claim_all(young.queue, worker, {"m": 10})
        ends = [AttemptEnd(claim.id, claim.attempt, AttemptOutcome.RETURNED) for claim in claims]
        lane = young.queue.end_batcher(worker, 5.0)
        await check(young, lane.submit_all(ends), "pk_results", "ix_results_queue", few=900)
        claiming = claim_all(young.queue, worker, {"m": 10})
        await check(young, claiming, "ix_results_queue", few=900)
        plan = await explain_unprepared(young, young.queue.expire())
        assert "ix_results_unclaimed_deadline_at" in plan


async def add_results(connection: Connection, count: int, state: str) -> None:
    """Results of one model and context, the oldest first in the queue."""
    context, is_done = new_id(), state != "pending"
    await connection.execute("INSERT INTO contexts (id, content) VALUES ($1, 'p')", context)
    await connection.execute(
        """INSERT INTO results (id, context_id, model_name, parameters, deadline_at, fair_key,
                                state, output, finished_at)
           SELECT id, $2, 'm', '{}', now() + interval '1 h', place, $3,
                  CASE WHEN $4 THEN 'text' END, CASE WHEN $4 THEN now() END
           FROM unnest($1::uuid[]) WITH ORDINALITY AS i(id, place)""",
        [new_id() for _ in range(count)],
        context,
        state,
        is_done,
    )


async def test_keys(table: Table) -> None:
    found = table.keys.find(TEAM, f"key {table.ids[500]}")
    await check(table, found, "pk_idempotency_keys")
    removal = table.keys.remove_expired()
    await check(table, removal, "ix_idempotency_keys_expires_at", "pk_idempotency_keys")


async def test_queue_position(table: Table) -> None:
    row = await table.database.fetchrow(
        "SELECT * FROM results WHERE state = 'pending' AND worker_id IS NULL LIMIT $1", 1
    )
    assert row is not None
    estimate = table.positions.estimate(row["id"], row["model_name"], is_running=False)
    await check(table, estimate, "ix_results_queue")


async def test_request_of_a_retry(table: Table) -> None:
    await check(table, table.results.request(TEAM, table.ids[500]))


async def test_expire(table: Table) -> None:
    table.database.statements.clear()
    assert await table.queue.expire() == 50
    plan = await explain_unprepared(table, table.queue.expire())
    assert "ix_results_unclaimed_deadline_at" in plan


async def explain_unprepared(table: Table, work: Awaitable[Any]) -> str:
    """The plans of statements without arguments, as text."""
    recorded: list[str] = []

    def record(logged: Any) -> None:
        recorded.append(logged.query)

    table.database._record = record  # type: ignore[method-assign]
    try:
        await work
    finally:
        del table.database._record
    bare = [query for query in recorded if "$1" not in query and query.lstrip()[0] in "SW"]
    async with Database.connection(table.database) as connection:
        rows = [await connection.fetch(f"EXPLAIN {query}") for query in bare]
    text = "\n".join(row[0] for found in rows for row in found)
    assert "Seq Scan on results" not in text
    return text


async def test_cancel(table: Table) -> None:
    await check(table, table.queue.cancel(TEAM, id=table.running[-1]), "pk_results")
    await check(table, table.queue.cancel(TEAM, model_name="rare"), few=MOST_PENDING)
    await check(
        table, table.queue.cancel(TEAM, context_id=table.context), "ix_results_context_id_id"
    )
    await check(table, table.queue.cancel(TEAM, model_name="nobody"), few=MOST_PENDING)


async def test_reads_by_id(table: Table) -> None:
    await check(table, table.results.get(TEAM, table.ids[500]), "pk_results")
    await check(table, table.results.partial_output(TEAM, table.running[-2]))
    await check(table, table.results.attempts(TEAM, table.ids[500]))
    await check(table, table.contexts.get(TEAM, table.context))
    await check(table, table.contexts.list(TEAM, None, 1000))
    await check(table, table.contexts.list(TEAM, table.context, 1000))


NEWEST = "ix_results_team_id_id"
LISTS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {NEWEST}),
    ({"state": "pending"}, {"ix_results_team_id_id_pending"}),
    ({"state": "failed"}, {"ix_results_team_id_id_failed"}),
    ({"state": "completed"}, {NEWEST}),
    ({"model_name": "model-1"}, {"ix_results_team_id_model_name_id"}),
    ({"model_name": "rare"}, {"ix_results_team_id_model_name_id"}),
    ({"model_name": "nobody"}, {"ix_results_team_id_model_name_id"}),
    ({"error_code": "model_error"}, {"ix_results_team_id_error_code_id"}),
    ({"error_code": "rare_code"}, {"ix_results_team_id_error_code_id"}),
    ({"error_code": "no_code"}, {"ix_results_team_id_error_code_id"}),
    ({"retryable": True}, {"ix_results_team_id_error_retryable_id"}),
    ({"state": "failed", "model_name": "rare"}, {"ix_results_model_name_team_id_id_failed"}),
    ({"state": "completed", "model_name": "rare"}, {"ix_results_team_id_model_name_id"}),
    ({"metadata": {"run": "busy"}}, {"pk_result_tags", "pk_results"}),
    ({"metadata": {"run": "rare"}}, {"pk_result_tags", "pk_results"}),
    ({"metadata": {"run": "none"}}, {"pk_result_tags"}),
]
# Several indexes serve these: the walk of the rare one ends, and bounds the other.
CODE, RETRYABLE = "ix_results_team_id_error_code_id", "ix_results_team_id_error_retryable_id"
FAILED_OF_MODEL = "ix_results_model_name_team_id_id_failed"
PAIRS: list[tuple[dict[str, Any], set[str]]] = [
    ({"state": "pending", "model_name": "rare"}, {"ix_results_team_id_model_name_id"}),
    ({"model_name": "rare", "error_code": "model_error"}, {FAILED_OF_MODEL, CODE}),
    ({"model_name": "model-1", "error_code": "rare_code"}, {CODE}),
    ({"model_name": "rare", "retryable": False}, {FAILED_OF_MODEL, RETRYABLE}),
    ({"error_code": "rare_code", "retryable": False}, {CODE}),
    ({"model_name": "model-1", "metadata": {"run": "none"}}, {"pk_result_tags", "pk_results"}),
    (
        {"model_name": "nobody", "metadata": {"run": "busy"}},
        {"ix_results_team_id_model_name_id", "pk_result_tags", "pk_results"},
    ),
    ({"metadata": {"run": "rare", "n": "1"}}, {"pk_result_tags", "pk_results"}),
]


@pytest.mark.parametrize(("filters", "indexes"), LISTS, ids=[str(filters) for filters, _ in LISTS])
@pytest.mark.parametrize("is_paged", [False, True])
async def test_lists(
    table: Table, filters: dict[str, Any], indexes: set[str], is_paged: bool
) -> None:
    after = table.ids[ROWS // 2] if is_paged else None
    page = table.results.list(TEAM, ResultFilter(**filters), after=after, limit=50, full=False)
    plans = await check(table, page, *indexes)
    assert not [node for node in nodes(plans[0]) if node["Node Type"] == "Sort"]


@pytest.mark.parametrize(("filters", "indexes"), PAIRS, ids=[str(filters) for filters, _ in PAIRS])
@pytest.mark.parametrize("is_paged", [False, True])
async def test_lists_by_several_filters(
    table: Table, filters: dict[str, Any], indexes: set[str], is_paged: bool
) -> None:
    after = table.ids[ROWS // 2] if is_paged else None
    page = table.results.list(TEAM, ResultFilter(**filters), after=after, limit=50, full=False)
    plans = await check(table, page, few=1_500)
    walked = [
        plan
        for plan, (query, _) in zip(plans, table.database.statements, strict=True)
        if "is_found" in query
    ]
    assert len(walked) <= 6, "pieces of both walks"
    scans = [node for plan in walked for node in nodes(plan) if "Index Name" in node]
    assert {node["Index Name"] for node in scans} == indexes
    if "error_code" in filters:
        assert {node["Node Type"] for node in scans} == {"Index Only Scan"}


async def test_lists_by_context_and_time(table: Table) -> None:
    by_context = ResultFilter(context_id=table.context)
    await check(
        table, table.results.list(TEAM, by_context, after=None, limit=50, full=True),
        "ix_results_context_id_id",
    )  # fmt: skip
    window = ResultFilter(
        created_after=created_at(table.ids[1000]), created_before=created_at(table.ids[1200])
    )
    await check(table, table.results.list(TEAM, window, after=None, limit=50, full=True), NEWEST)


async def test_delete(table: Table) -> None:
    await check(table, table.results.delete(TEAM, table.ids[-1], force=True), "pk_results")
    async with Database.connection(table.database) as connection:
        context = await connection.fetchval(
            "SELECT context_id FROM results WHERE id = $1", table.running[5]
        )
    with pytest.raises(ConflictError):
        await table.contexts.delete(TEAM, context, force=False)
    await check(table, table.contexts.delete(TEAM, context, force=True), "ix_results_context_id_id")


async def test_queue_depth_reads_the_queue_alone(table: Table) -> None:
    plan = await explain_unprepared(table, table.depth.by_model())
    assert "ix_results_queue" in plan


async def test_webhooks_due(table: Table) -> None:
    await check(table, table.outbox.claim(32, 30.0), "ix_webhook_deliveries_next_attempt_at")
    claim = table.outbox.claim(32, 30.0, ["busy.example"])
    await check(table, claim, "ix_webhook_deliveries_next_attempt_at")
    dues = await table.outbox.claim(100, 30.0)
    assert len(dues) == 100
    verdicts = [Verdict(due, "delivered", 0, "{}") for due in dues]
    await check(table, conclude_all(table, verdicts), "pk_webhook_deliveries")
    plan = await explain_unprepared(table, table.outbox.seconds_until_due())
    assert "ix_webhook_deliveries_next_attempt_at" in plan
    again = table.outbox.redeliver(TEAM, dues[0].result_id)
    await check(table, again, "ix_webhook_deliveries_team_id_result_id")


async def conclude_all(table: Table, verdicts: list[Verdict]) -> None:
    await asyncio.gather(*(table.outbox.conclude(verdict) for verdict in verdicts))


@pytest.mark.parametrize("state", [None, "pending", "failed", "delivered"])
@pytest.mark.parametrize("is_paged", [False, True])
async def test_lists_of_webhooks(table: Table, state: State | None, is_paged: bool) -> None:
    name = "ix_webhook_deliveries_team_id_result_id"
    index = f"{name}_open" if state in ("pending", "failed") else name
    for result_id in (None, table.ids[77]):
        after = table.ids[ROWS // 2] if is_paged else None
        page = table.outbox.list(TEAM, state=state, result_id=result_id, after=after, limit=50)
        plans = await check(table, page, index)
        assert not [node for node in nodes(plans[0]) if node["Node Type"] == "Sort"]


async def test_batches(table: Table) -> None:
    feeder, work, store = new_id(), BatchWork(table.database), BatchStore(table.database)
    await check(table, work.claim(feeder, 5, 60.0))  # by either index of the active ones
    await work.claim(feeder, 64, 60.0)
    await check(table, work.renew(feeder, table.batch, 60.0), "ix_batches_active")
    await check(table, work.look(feeder, table.batch), "ix_batches_active")
    await check(table, store.list(TEAM, table.batch, 20), "ix_batches_team_id_id")
    await check(table, store.get(TEAM, table.batch))
    key = NewKey("k", b"hash", 60.0)
    await check(table, store.find(TEAM, key), "ix_batches_team_id_idempotency_key")
    store = BatchStore(table.database, max_open=100)
    new = NewBatch(new_id(), TEAM, "/v1/completions", new_id(), "24h", "{}", 60.0, None, key)
    await check(
        table,
        store.create(new),
        "ix_batches_team_id_active",
        "ix_batches_team_id_idempotency_key",
    )


async def test_lines_of_a_batch(table: Table) -> None:
    work = BatchWork(table.database)
    waiting = work.waiting(table.batch, SENT.stop, 100)
    await check(table, waiting, "ix_batch_lines_batch_id_line_waiting")
    await check(table, work.sent(table.batch), "ix_batch_lines_batch_id_line_sent")
    await check(table, work.body(table.batch, SENT.start), "pk_batch_lines")
    numbers = [line.line for line in await work.waiting(table.batch, SENT.stop, 100)]
    given = work.assign(table.batch, {number: [new_id()] for number in numbers})
    await check(table, given, "ix_batch_lines_batch_id_line_waiting")
    await check(table, work.mark_sent(table.batch, numbers))
    outcomes = [LineOutcome(number, True, "done") for number in numbers]
    await check(table, work.mark_done(table.batch, outcomes), "pk_batch_lines")
    await check(table, work.outcomes(table.batch, 20_000, 100), "pk_batch_lines")
    await check(table, work.over(table.ids[:500]), "pk_results")


async def test_lists_and_removal_of_files(table: Table) -> None:
    files = FileStore(table.database)
    page = files.list(TEAM, purpose=None, after=table.ids[5_000], limit=50, order="desc")
    await check(table, page, "ix_files_team_id_id")
    await check(table, files.remove_expired(), "ix_files_expires_at", "ix_files_unfinished")


async def test_erasure(table: Table) -> None:
    erasure = Erasure(table.database)
    await check(table, erasure.erase(table.ids[:50]), "pk_results")
    async with Database.connection(table.database) as connection:
        await connection.execute(
            "UPDATE results SET finished_at = now() - interval '2 h' WHERE NOT store AND finished_at IS NOT NULL"
        )
    await check(table, erasure.erase_undelivered(), "ix_results_finished_at_to_erase")


async def test_digest(table: Table) -> None:
    digest = ResultIndexer(table.database, table.depth, table.settings)
    async with Database.connection(table.database) as connection:
        await connection.execute(
            "INSERT INTO undigested_results (result_id) SELECT unnest($1::uuid[])",
            table.ids[10_000:20_000],
        )
        await connection.execute("ANALYZE undigested_results")
    await digest.index()
    await check(table, digest.index(), "pk_results", "pk_contexts", "pk_undigested_results")
    await check(table, digest.index_older(), "pk_results", "pk_result_search")


async def test_export(table: Table) -> None:
    export = ResultExport(table.database, table.settings)

    async def read(narrowed: ResultFilter) -> None:
        rows = export.read(TEAM, narrowed, after=table.ids[ROWS // 2], limit=600)
        assert sum([len(piece) async for piece in rows]) == 600

    await check(table, read(ResultFilter()), NEWEST, "pk_results")
    by_model = ResultFilter(model_name="model-1")
    await check(table, read(by_model), "ix_results_team_id_model_name_id", "pk_results")


async def test_figures(table: Table) -> None:
    async with Database.connection(table.database) as connection:
        for name in ("minute_stats", "queue_samples"):
            await connection.execute(f"TRUNCATE {name}")
        await connection.execute(
            """INSERT INTO minute_stats SELECT t, now() - make_interval(mins => m), 'm', 'completed', 1,
                 1, 1, '{}', '{}', '{}' FROM generate_series(1, 10000) m,
                 unnest(ARRAY['default', 'a', 'b', 'c', 'd']) t"""
        )
        await connection.execute(
            """INSERT INTO queue_samples SELECT now() - make_interval(mins => m), 'q', 1, 1
               FROM generate_series(1, 10000) m"""
        )
        await connection.execute("ANALYZE minute_stats, queue_samples")
    history = HistoryStore(table.database)
    window = await history.window(60)
    await check(table, history.points(window, TEAM, "m"), "pk_minute_stats")
    await check(table, history.points(window, None), "ix_minute_stats_minute")
    await check(table, history.failures(window), "ix_minute_stats_minute")
    await check(table, history.queues(window), "pk_queue_samples")
    system = SystemStore(table.database, table.depth, history)
    assert "ix_results_queue_team" in await explain_unprepared(table, system.state(60))


async def test_retention(table: Table) -> None:
    """Some of the oldest are due, in pages, among a hundred thousand that are not."""
    cutoff = created_at(table.ids[1_500])
    old = [identifier for identifier in table.ids[:1_500] if created_at(identifier) < cutoff]
    assert len(old) > 200
    async with Database.connection(table.database) as connection:
        await connection.execute(
            "UPDATE results SET finished_at = $2 WHERE id = ANY($1::uuid[]) AND state <> 'pending'",
            old, cutoff - timedelta(seconds=1),
        )  # fmt: skip
        await connection.execute(
            """INSERT INTO result_search (result_id, team_id) SELECT unnest($1::uuid[]), 'default'
               ON CONFLICT DO NOTHING""",
            old,
        )
        await connection.execute("ANALYZE result_search")

    async def clock() -> datetime:
        return cutoff + timedelta(days=1)

    for kind in ("prompts_retention_seconds", "results_retention_seconds"):
        settings = table.settings.model_copy(update={kind: 86_400.0})
        async with Database.connection(table.database) as connection:
            await connection.execute("UPDATE retention_state SET looked_at = NULL")
        retention = Retention(table.database, settings, clock=clock, share=1)
        await check(table, retention.look(), NEWEST)
    async with Database.connection(table.database) as connection:
        left = await connection.fetchval(
            "SELECT count(*) FROM results WHERE id = ANY($1::uuid[]) AND state <> 'pending'", old
        )
    assert left < len(old) / 10  # those whose webhook is owed


async def test_these_checks_can_fail(table: Table) -> None:
    """A statement without its index is caught."""
    with pytest.raises(AssertionError):
        await check(
            table,
            table.database.fetch("SELECT count(*) FROM results WHERE finish_reason = $1", "stop"),
        )
