"""Texts that are not stored: an erased context is not an empty prompt, in any order of events."""

import asyncio
from collections.abc import Sequence
from uuid import UUID

import asyncpg

from app.core.database import Database
from app.core.errors import NotFoundError
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.job_queue import JobQueue
from app.results.contexts import ContextStore
from app.results.retention.erasure import Erasure
from tests.conftest import Service, connect
from tests.integration.support import assert_problem, until

ROUNDS = 150
RESULTS = 3
INSERT = """
INSERT INTO results (id, context_id, model_name, parameters, deadline_at, state, finished_at, output,
                     store)
SELECT id, $2, 'scripted', '{"max_tokens": 4}', now(), 'completed', now(), 'text', $3 FROM unnest($1::uuid[]) AS i(id)
"""
BLOCKED = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query ~ $1
"""


async def add(
    connection: asyncpg.Connection, count: int = 1, *, store: bool = False
) -> tuple[UUID, Sequence[UUID]]:
    """A context with completed results; their ids."""
    context_id, ids = new_id(), [new_id() for _ in range(count)]
    await connection.execute(
        "INSERT INTO contexts (id, content) VALUES ($1, '{{chunks=1}}')", context_id
    )
    await connection.execute(INSERT, ids, context_id, store)
    return context_id, ids


async def test_an_erased_context_is_not_sent_again(
    service: Service, connection: asyncpg.Connection
) -> None:
    client = service.client
    body = {"model": "scripted", "prompt": "{{chunks=1}}", "store": False}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    result_id = answer.headers["X-Result-Id"]
    await until(lambda: connection.fetchval("SELECT erased_at FROM results"))
    context_id = (await client.get(f"/results/{result_id}")).json()["context_id"]
    context = (await client.get(f"/contexts/{context_id}")).json()
    assert context["content"] == ""
    assert context["erased_at"]
    again = {"model": "scripted", "context_id": context_id}
    for key in ({}, {"Idempotency-Key": "k"}):
        for path, sent in (
            (f"/models/send/scripted/{context_id}", None),
            ("/results/", again),
            (f"/results/{result_id}/retry", None),
        ):
            assert_problem(await client.post(path, json=sent, headers=key), 410, "erased")
    listed = await client.post("/results/", json=[again, again | {"idempotency_key": "l"}])
    assert [item["code"] for item in listed.json()] == ["erased", "erased"]
    assert await connection.fetchval("SELECT count(*) FROM results") == 1
    # A context that is merely empty is one.
    kept = await client.post("/contexts/", json={"messages": [{"role": "user", "content": ""}]})
    assert "erased_at" not in kept.json()


async def test_who_sends_while_a_context_is_erased_is_refused(
    service: Service, connection: asyncpg.Connection
) -> None:
    context_id, ids = await add(connection)
    async with connection.transaction():
        await connection.execute("SELECT FROM contexts WHERE id = $1 FOR UPDATE", context_id)
        sent = [
            asyncio.create_task(service.client.post(path))
            for path in (f"/models/send/scripted/{context_id}", f"/results/{ids[0]}/retry")
        ]
        watcher = await connect(service.services.settings)
        await until(lambda: watcher.fetchval(BLOCKED, "may_start"))
        await watcher.close()
        await connection.execute("UPDATE results SET erased_at = now(), output = NULL")
        await connection.execute("UPDATE contexts SET erased_at = now(), content = ''")
    for answer in await asyncio.gather(*sent):
        assert_problem(answer, 410, "erased")
    assert await connection.fetchval("SELECT count(*) FROM results") == 1


async def test_a_context_that_is_being_sent_is_not_erased(
    api: Service, connection: asyncpg.Connection
) -> None:
    context_id, ids = await add(connection)
    erasure = api.services.erasure
    async with connection.transaction():
        await connection.execute("SELECT FROM contexts WHERE id = $1 FOR KEY SHARE", context_id)
        erasing = asyncio.create_task(erasure.erase(ids))
        watcher = await connect(api.services.settings)
        await until(lambda: watcher.fetchval(BLOCKED, "FOR UPDATE"))
        await watcher.close()
        await connection.execute(INSERT, [new_id()], context_id, True)
    await erasing
    assert await connection.fetchval("SELECT content FROM contexts") == "{{chunks=1}}"
    erased = await connection.fetch("SELECT id FROM results WHERE erased_at IS NOT NULL")
    assert [row["id"] for row in erased] == ids


async def test_many_are_erased_at_once_and_old_ones_by_themselves(
    api: Service, connection: asyncpg.Connection
) -> None:
    many = [await add(connection, 2) for _ in range(300)]
    kept, _ = await add(connection, 2, store=True)
    await api.services.erasure.erase([ids[0] for _, ids in many])
    assert await connection.fetchval("SELECT count(*) FROM results WHERE erased_at IS NULL") == 302
    # The other result of each has its prompt yet.
    assert not await connection.fetchval("SELECT count(*) FROM contexts WHERE content = ''")
    await connection.execute("UPDATE results SET finished_at = now() - interval '2 h'")
    await api.services.erasure.erase_undelivered()
    left = await connection.fetch("SELECT id FROM contexts WHERE erased_at IS NULL")
    assert [row["id"] for row in left] == [kept]


async def test_a_deletion_locks_pending_results_in_their_order(settings: Settings) -> None:
    """It holds no younger result while it waits for an older one, also if only one of them is pending."""
    connection = await connect(settings)
    blocker = await connect(settings)
    async with Database(settings, "deletion") as database:
        contexts = ContextStore(database, JobQueue(database, settings), settings)
        context_id, (ended, pending) = await add(connection, 2)
        await connection.execute(
            "UPDATE results SET state = 'pending', finished_at = NULL, output = NULL WHERE id = $1",
            pending,
        )
        lock = "SELECT FROM results WHERE id = $1 FOR UPDATE"
        transaction = blocker.transaction()
        await transaction.start()
        await blocker.execute(lock, ended)
        deletion = asyncio.create_task(contexts.delete("default", context_id, force=True))
        await until(lambda: connection.fetch(BLOCKED, "FOR UPDATE"))
        await blocker.execute(f"{lock} NOWAIT", pending)
        await transaction.rollback()
        await deletion
    assert not await connection.fetch("SELECT FROM results WHERE context_id = $1", context_id)
    await blocker.close()
    await connection.close()


async def test_erasure_and_deletion_wait_for_each_other_in_one_order(settings: Settings) -> None:
    connection = await connect(settings)
    async with Database(settings, "one") as one, Database(settings, "other") as other:
        erasure = Erasure(one)
        contexts = ContextStore(other, JobQueue(other, settings), settings)

        async def delete(context_id: UUID) -> None:
            await contexts.delete("default", context_id, force=True)

        for _ in range(ROUNDS):
            context_id, ids = await add(connection, RESULTS)
            await asyncio.gather(erasure.erase(ids), delete(context_id))
            try:
                await contexts.get("default", context_id)
            except NotFoundError:
                continue
            raise AssertionError("it is still there")
    others = """SELECT count(*) = 0 FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()"""
    await until(lambda: connection.fetchval(others))  # a backend that ends has reported its counts
    assert not await connection.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    await connection.close()
