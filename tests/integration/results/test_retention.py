"""Retention: ended results are deleted after their time, and no others, under any locks."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from app.cli.main import main
from app.core.database import Database
from app.core.ids import lowest_id, new_id
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.results.retention import retention
from app.results.retention.policy import FOREVER, RetentionPolicy
from app.results.retention.retention import MAX_ADVANCE_SECONDS, Retention
from app.results.word_indexer import WordIndexer
from tests.conftest import Service
from tests.integration.support import (
    UNKNOWN_ID,
    assert_openai_error,
    assert_problem,
    finish,
    read,
    send,
    until,
)

HOUR, DAY = 3_600.0, 86_400.0
ENDED = """
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at, state, finished_at,
  output, prompt, kind, source_id, group_id, webhook_url, expires_at, error_code, error_message,
  error_retryable)
VALUES ($1, $2, $3, 'scripted', '{"max_tokens": 4}', now(), $4::text, $5, 'an answer', 'a prompt', $6, $7,
  $8, $9, $10, CASE WHEN $4::text = 'failed' THEN 'cancelled' END, CASE WHEN $4::text = 'failed' THEN 'x' END,
  CASE WHEN $4::text = 'failed' THEN false END)
"""


class House:
    """A database with rows of any age, and passes at any time."""

    def __init__(self, connection: asyncpg.Connection, now: datetime) -> None:
        self.connection = connection
        self.now = now

    async def context(self, *, team: str = "default", age: float = 0.0) -> UUID:
        identifier = self.id_of(age)
        await self.connection.execute(
            "INSERT INTO contexts (id, team_id, content) VALUES ($1, $2, 'a prompt')",
            identifier,
            team,
        )
        return identifier

    async def result(
        self,
        context: UUID | None = None,
        *,
        age: float,
        team: str = "default",
        state: str = "completed",
        kind: str = "generation",
        source: UUID | None = None,
        group: UUID | None = None,
        retain: float | None = None,
        counted: bool = True,
    ) -> UUID:
        """A result that was made an hour before it ended, `age` seconds ago."""
        identifier = self.id_of(age + HOUR)
        context = context or await self.context(team=team, age=age + HOUR)
        ended = None if state == "pending" else self.now - timedelta(seconds=age)
        expires = None if retain is None or ended is None else ended + timedelta(seconds=retain)
        await self.connection.execute(
            ENDED, identifier, team, context, state, ended, kind, source, group, None, expires
        )
        if counted and ended:
            await self.connection.execute(
                """INSERT INTO result_search VALUES ($1, $2, to_tsvector('simple', 'a prompt answer'))
                   ON CONFLICT DO NOTHING""",
                identifier, team,
            )  # fmt: skip
        return identifier

    def id_of(self, age: float) -> UUID:
        low = lowest_id(self.now - timedelta(seconds=age))
        return UUID(int=low.int | new_id().int & ((1 << 62) - 1))

    async def left(self, table: str = "results") -> set[UUID]:
        return {row["id"] for row in await self.connection.fetch(f"SELECT id FROM {table}")}


@pytest.fixture
async def house(connection: asyncpg.Connection) -> House:
    return House(connection, await connection.fetchval("SELECT now()"))


async def look(
    settings: Settings,
    *,
    results: float | None = None,
    prompts: float | None = None,
    clock: Callable[[], Any] | None = None,
) -> None:
    """One pass."""
    changed = settings.model_copy(
        update={"results_retention_seconds": results, "prompts_retention_seconds": prompts}
    )
    async with Database(changed, "retention") as database:
        await database.fetch("UPDATE retention_state SET looked_at = NULL")
        assert await Retention(database, changed, clock=clock, share=1).look()


async def test_what_has_ended_long_ago_goes_and_nothing_that_is_pending(
    settings: Settings, house: House
) -> None:
    old = [await house.result(age=age, state=state) for age, state in (
        (DAY, "completed"), (2 * DAY, "failed"), (HOUR + 1, "completed"))]  # fmt: skip
    kept = {
        await house.result(age=HOUR - 60),
        await house.result(age=90 * DAY, state="pending"),
        await house.result(age=DAY, counted=False),
    }
    prompts = await house.left("contexts")
    await look(settings)
    assert await house.left() == kept | set(old)
    await look(settings, results=HOUR)
    assert await house.left() == kept
    # The prompts have a time of their own.
    assert await house.left("contexts") == prompts
    await look(settings, results=HOUR, prompts=HOUR)
    assert len(await house.left("contexts")) == len(kept)
    assert await house.connection.fetchval("SELECT count(*) FROM result_search") == 1


async def test_hundreds_go_in_steps_and_what_is_not_due_between_them_stays(
    settings: Settings, house: House
) -> None:
    context = await house.context(age=3 * DAY)
    old = {await house.result(context, age=DAY + place) for place in range(450)}
    late = await house.result(context, age=DAY + 200, state="pending")
    await look(settings, results=DAY, prompts=DAY)
    assert await house.left() == {late}
    assert old
    assert await house.left("contexts") == {context}


async def test_each_team_has_its_own_word(settings: Settings, house: House) -> None:
    for team in ("default", "short", "long", "forever"):
        for age in (2 * HOUR, 2 * DAY, 20 * DAY):
            await house.result(age=age, team=team)
    async with Database(settings, "test") as database:
        policy = RetentionPolicy(database, settings)
        await policy.set("short", HOUR, None)
        await policy.set("long", 10 * DAY, None)
        await policy.set("forever", FOREVER, None)
    query = "SELECT team_id, count(*) AS count FROM results GROUP BY team_id"
    await look(settings)
    counts = {row["team_id"]: row["count"] for row in await house.connection.fetch(query)}
    assert counts == {"default": 3, "long": 2, "forever": 3}
    await look(settings, results=DAY)
    counts = {row["team_id"]: row["count"] for row in await house.connection.fetch(query)}
    assert counts == {"default": 1, "long": 2, "forever": 3}


async def test_each_team_has_its_own_time_of_prompts(settings: Settings, house: House) -> None:
    for team in ("default", "short", "forever"):
        await house.result(age=2 * DAY, team=team)
    async with Database(settings, "test") as database:
        policy = RetentionPolicy(database, settings)
        await policy.set("short", None, HOUR)
        await policy.set("forever", None, FOREVER)
    query = "SELECT team_id FROM contexts WHERE erased_at IS NOT NULL ORDER BY team_id"
    await look(settings)
    assert [row["team_id"] for row in await house.connection.fetch(query)] == ["short"]
    await look(settings, prompts=DAY)
    assert [row["team_id"] for row in await house.connection.fetch(query)] == ["default", "short"]


async def test_a_prompt_may_go_before_its_answers_and_they_are_found_by_their_own_words(
    settings: Settings, house: House
) -> None:
    shared = await house.context(age=9 * DAY)
    answers = [await house.result(shared, age=age) for age in (3 * DAY, 2 * DAY)]
    used = await house.context(age=9 * DAY)
    for age in (3 * DAY, HOUR):
        await house.result(used, age=age)
    waiting = await house.context(age=9 * DAY)
    await house.result(waiting, age=3 * DAY)
    await house.result(waiting, age=3 * DAY, state="pending")
    never_sent = await house.context(age=99 * DAY)
    await house.connection.execute(
        """UPDATE results SET parameters = '{"max_tokens": 5, "prompt_token_ids": [1, 2]}', reuse_digest = 'x'"""
    )
    await look(settings, prompts=DAY)
    erased = await house.connection.fetch("SELECT id FROM contexts WHERE erased_at IS NOT NULL")
    assert [row["id"] for row in erased] == [shared]
    assert len(await house.left("contexts")) == 4
    rows = await house.connection.fetch(
        """SELECT id, output, prompt, request, parameters, reuse_digest FROM results
           WHERE prompt IS NULL"""
    )
    assert {row["id"] for row in rows} == set(answers)
    assert {row["output"] for row in rows} == {"an answer"}
    assert {row["reuse_digest"] for row in rows} == {None}
    assert {row["parameters"] for row in rows} == {'{"max_tokens": 5}'}
    # The pass reads no text: it leaves them to the indexer.
    words = "SELECT words::text FROM result_search WHERE result_id = ANY($1)"
    assert [row["words"] for row in await house.connection.fetch(words, answers)] == [None] * 2
    async with Database(settings, "words") as database:
        assert not await WordIndexer(database, settings).index()
    found = await house.connection.fetch(words, answers)
    assert all("answer" in row["words"] and "prompt" not in row["words"] for row in found)
    # The last of a prompt's results comes to its turn later.
    later = house.now + timedelta(days=2)
    await house.connection.execute("UPDATE retention_state SET trusted_at = $1", later)
    await look(settings, prompts=DAY, clock=lambda: _at(later))
    left = await house.connection.fetch("SELECT id FROM contexts WHERE erased_at IS NULL")
    assert {row["id"] for row in left} == {waiting, never_sent}


async def test_words_of_a_prompt_that_are_found_while_it_is_erased_are_found_again(
    settings: Settings, house: House
) -> None:
    """The indexer has read the prompt, and stores its words after the pass has looked."""
    answer = await house.result(age=3 * DAY)
    await house.connection.execute("UPDATE result_search SET words = NULL")
    async with Database(settings, "words") as database:
        async with database.connection() as indexer, indexer.transaction():
            await indexer.execute("UPDATE result_search SET words = to_tsvector('prompt answer')")
            erasing = asyncio.create_task(look(settings, prompts=DAY))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            await until(lambda: house.connection.fetchval(waits))
        await erasing
        await WordIndexer(database, settings).index()
    words = "SELECT words::text FROM result_search WHERE result_id = $1"
    found = await house.connection.fetchval(words, answer)
    assert "answer" in found
    assert "prompt" not in found


async def _at(moment: datetime) -> datetime:
    return moment


async def test_a_prompt_that_loses_its_results_goes_when_its_own_time_is_over(
    service: Service, house: House
) -> None:
    settings = service.services.settings
    outlives = await house.result(age=2 * HOUR)
    await look(settings, results=HOUR, prompts=DAY)
    assert outlives not in await house.left()
    assert len(await house.left("contexts")) == 1
    by_hand = await finish(service, "{{chunks=1}}")
    assert (await service.client.delete(f"/results/{by_hand['id']}")).status_code == 204
    # Judged already, and kept for the sake of a later one that is deleted then.
    context = await house.context(age=3 * DAY)
    await house.result(context, age=2 * DAY)
    last = await house.result(context, age=HOUR)
    await look(settings, prompts=DAY)
    assert (await service.client.delete(f"/results/{last}")).status_code == 204
    await house.connection.execute(
        "UPDATE contexts SET unused_since = unused_since - interval '2 d'"
    )
    await look(settings, prompts=DAY)
    rows = await house.connection.fetch("SELECT id, erased_at FROM contexts")
    assert [row["id"] for row in rows] == [context]
    assert rows[0]["erased_at"]


async def test_groups_texts_with_attributions_and_owed_deliveries_are_whole(
    settings: Settings, house: House
) -> None:
    group = new_id()
    young = [await house.result(age=age, group=group) for age in (2 * DAY, HOUR)]
    group = new_id()
    for age in (2 * DAY, 3 * DAY):
        await house.result(age=age, group=group)
    context = await house.context(age=9 * DAY)
    source = await house.result(context, age=2 * DAY)
    attributed = await house.result(context, age=HOUR, kind="attribution", source=source)
    other = await house.context(age=9 * DAY)
    waits = await house.result(other, age=2 * DAY)
    asked = await house.result(other, age=HOUR, kind="attribution", source=waits, state="pending")
    owed = await house.result(age=2 * DAY)
    await house.connection.execute(
        "INSERT INTO webhook_deliveries (result_id, team_id, url) VALUES ($1, 'default', 'x')", owed
    )
    await look(settings, results=DAY)
    assert await house.left() == {*young, waits, asked, owed}
    assert attributed not in await house.left()
    await house.connection.execute(
        "UPDATE webhook_deliveries SET state = 'failed', finished_at = now()"
    )
    await look(settings, results=DAY)
    assert owed not in await house.left()


async def test_a_batch_takes_its_answers_first_and_goes_with_its_files(
    settings: Settings, house: House
) -> None:
    result = await house.result(age=2 * DAY)
    assigned = await house.result(age=2 * DAY)
    batches = {state: house.id_of(3 * DAY) for state in ("in_progress", "completed")}
    files = [new_id() for _ in range(3)]
    for identifier in files:
        await house.connection.execute(
            """INSERT INTO files (id, team_id, purpose, filename, size)
               VALUES ($1, 'default', 'batch', 'f', 1)""",
            identifier,
        )
    for state, identifier in batches.items():
        is_over = state == "completed"
        await house.connection.execute(
            """INSERT INTO batches (id, team_id, endpoint, input_file_id, output_file_id,
                 completion_window, state, expires_at, ended_at)
               VALUES ($1, 'default', 'x', $2, $3, '24h', $4, now(), $5)""",
            identifier, files[0] if is_over else files[2], files[1] if is_over else None, state,
            house.now - timedelta(days=2) if is_over else None,
        )  # fmt: skip
    lines = "INSERT INTO batch_lines (batch_id, line, custom_id, state, body, result_ids) VALUES"
    open_batch = batches["in_progress"]
    await house.connection.execute(
        f"{lines} ($1, 1, 'a', 'sent', '{{}}', $2), ($1, 2, 'b', 'waiting', '{{}}', $3)",
        open_batch, [result], [assigned],
    )  # fmt: skip
    await look(settings, results=DAY)
    assert await house.left() == {result, assigned}
    assert await house.left("batches") == {open_batch}
    assert await house.left("files") == {files[0], files[2]}
    await house.connection.execute("DELETE FROM batch_lines")
    await look(settings, results=DAY)
    assert not await house.left()


async def test_an_input_file_goes_with_the_prompts_of_its_last_batch(
    settings: Settings, house: House
) -> None:
    used, again, never = (new_id() for _ in range(3))
    for identifier in (used, again, never):
        await house.connection.execute(
            """INSERT INTO files (id, team_id, purpose, filename, size)
               VALUES ($1, 'default', 'batch', 'f', 1)""",
            identifier,
        )
    for file, state, age in (
        (used, "completed", DAY), (again, "failed", DAY), (again, "validating", None)
    ):  # fmt: skip
        await house.connection.execute(
            """INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state,
                 expires_at, ended_at) VALUES ($1, 'default', 'x', $2, '24h', $3, now(), $4)""",
            house.id_of(2 * DAY), file, state, None if age is None else house.now - timedelta(seconds=age),
        )  # fmt: skip
    await look(settings, prompts=HOUR)
    assert await house.left("files") == {again, never}


async def test_a_request_may_have_its_result_deleted_sooner(service: Service) -> None:
    settings = service.services.settings
    connection = await asyncpg.connect(dsn=None, **_address(settings))
    short = await finish(service, "{{chunks=1}}", retain_seconds=60)
    kept = await finish(service, "{{chunks=1}}")
    retried = await service.client.post(f"/results/{short['id']}/retry")
    await read(service, retried.json()["id"], wait=30)
    cancelled = await send(service, "{{chunks=100 delay_ms=500}}", retain_seconds=3600.5)
    await service.client.post(f"/results/{cancelled['id']}/cancel")
    expires = {
        str(row["id"]): row["seconds"]
        for row in await connection.fetch(
            """SELECT id, extract(epoch FROM expires_at - finished_at)::float8 AS seconds FROM results
               WHERE expires_at IS NOT NULL"""
        )
    }
    assert expires.keys() == {short["id"], retried.json()["id"], cancelled["id"]}
    assert round(expires[short["id"]]) == round(expires[retried.json()["id"]]) == 60
    await until(lambda: connection.fetchval("SELECT count(*) = 0 FROM undigested_results"))
    await connection.execute("UPDATE results SET expires_at = expires_at - interval '2 minutes'")
    await look(settings)
    found = (await service.client.get(f"/results/{short['id']}")).status_code
    assert (found, (await read(service, kept["id"]))["state"]) == (404, "completed")
    # The counts of deleted results stay.
    assert await connection.fetchval("SELECT sum(results) FROM minute_stats") == 4
    body = {"model": "scripted", "content": "x"}
    for wrong in (59, -1, 1e10, "60", 0):
        answer = await service.client.post("/results/", json=body | {"retain_seconds": wrong})
        assert_problem(answer, 422, "invalid_request", "retain_seconds")
    await service.services.retention.set("default", 100.0, None)
    answer = await service.client.post("/results/", json=body | {"retain_seconds": 101})
    assert "at most 100" in str(assert_problem(answer, 422, "invalid_request", "retain_seconds"))
    await connection.close()


def _address(settings: Settings) -> dict[str, Any]:
    ((host, port),) = settings.database_addresses()
    return {
        "host": host, "port": port, "user": settings.database_user, "database": settings.database_name,
        "password": settings.database_password.get_secret_value(),
    }  # fmt: skip


async def test_what_is_gone_is_told_as_such(service: Service, house: House) -> None:
    settings, client = service.services.settings, service.client
    key = {"Idempotency-Key": "k"}
    body = {"model": "scripted", "content": "{{chunks=1}}"}
    first = await client.post("/results/?wait=30", json=body, headers=key)
    answer = await client.post(
        "/v1/responses", json={"model": "scripted", "input": "{{chunks=1}}", "background": True}
    )
    response = answer.json()["id"]
    await until(lambda: house.connection.fetchval(
        "SELECT count(*) = 2 FROM result_search"))  # fmt: skip
    later = house.now + timedelta(hours=3)
    await house.connection.execute("UPDATE retention_state SET trusted_at = $1", later)
    await look(settings, prompts=HOUR, clock=lambda: _at(later))
    result = first.json()["id"]
    assert (await read(service, result))["result"]
    assert_problem(await client.post(f"/results/{result}/retry"), 410, "erased")
    if not answer.is_error:
        assert_openai_error(await client.get(f"/v1/responses/{response}"), 404)
    await look(settings, results=HOUR, prompts=HOUR, clock=lambda: _at(later))
    assert_problem(await client.get(f"/results/{result}"), 404, "not_found")
    again = await client.post("/results/", json=body, headers=key)
    assert again.status_code == 202
    assert again.json()["id"] != result


async def test_what_somebody_holds_is_left_to_the_next_pass_and_nobody_waits(
    settings: Settings, house: House
) -> None:
    held = await house.result(age=2 * DAY)
    sent = await house.context(age=3 * DAY)
    await house.result(sent, age=2 * DAY)
    free = await house.result(age=2 * DAY)
    async with house.connection.transaction():
        await house.connection.execute("SELECT FROM results WHERE id = $1 FOR KEY SHARE", held)
        await house.connection.execute("SELECT FROM contexts WHERE id = $1 FOR KEY SHARE", sent)
        async with asyncio.timeout(30):
            await look(settings, results=DAY, prompts=DAY)
    left = await house.left()
    assert held in left
    assert free not in left
    assert sent in await house.left("contexts")
    await look(settings, results=DAY, prompts=DAY)
    assert not await house.left()
    assert not await house.left("contexts")


async def test_many_passes_at_once_delete_everything_once(settings: Settings, house: House) -> None:
    for _ in range(60):
        context = await house.context(age=3 * DAY)
        for age in (2 * DAY, 3 * DAY):
            await house.result(context, age=age)
    passes = [asyncio.create_task(look(settings, results=DAY, prompts=DAY)) for _ in range(3)]
    # One is killed in the middle: its transaction is undone.
    await asyncio.sleep(0.05)
    passes[0].cancel()
    await asyncio.gather(*passes, return_exceptions=True)
    await look(settings, results=DAY, prompts=DAY)
    assert not await house.left()
    assert not await house.left("contexts")


async def test_one_process_gets_the_pass(settings: Settings) -> None:
    async with Database(settings, "one") as one, Database(settings, "other") as other:
        looks = [Retention(database, settings).look() for database in (one, other, one)]
        assert sorted(await asyncio.gather(*looks)) == [False, False, True]


async def test_a_service_that_runs_deletes_due_results(settings: Settings, house: House) -> None:
    await house.result(age=DAY)
    changed = settings.model_copy(update={"results_retention_seconds": HOUR})

    async def is_deleted() -> bool:
        return not await house.left()

    async with Database(changed, "retention") as database:
        running = asyncio.create_task(Retention(database, changed, share=1).run())
        try:
            await until(is_deleted)
        finally:
            await cancel_all([running])


async def test_a_clock_that_jumps_deletes_no_faster_and_is_told(
    settings: Settings, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    ages = [60.0 * minutes for minutes in range(0, 100, 5)]
    for age in ages:
        await house.result(age=age)
    await look(settings, results=2 * HOUR)
    assert len(await house.left()) == len(ages)
    jumped = house.now + timedelta(days=365)
    changed = settings.model_copy(update={"results_retention_seconds": 2 * HOUR})
    caplog.set_level(logging.WARNING, "app.results.retention.retention")
    moments = (jumped + timedelta(minutes=minute) for minute in itertools.count())
    async with Database(changed, "retention") as database:
        retention = Retention(database, changed, clock=lambda: _at(next(moments)), share=1)
        for _ in range(4):
            assert await retention.look()
        behind = await house.connection.fetchval("SELECT trusted_at FROM retention_state")
        assert abs((behind - house.now).total_seconds() - 4 * MAX_ADVANCE_SECONDS) < 60
        # 40 minutes of trusted time: what ended more than 80 minutes ago.
        assert len(await house.left()) == sum(
            age < 2 * HOUR - 4 * MAX_ADVANCE_SECONDS for age in ages
        )
        # The first of these passes warns, and the others do not repeat it.
        assert len([one for one in caplog.records if "jumped" in one.message]) == 1
        # Set right again, it goes on from there.
        right = Retention(database, changed, share=1)
        assert await right.look()
        assert await house.connection.fetchval("SELECT trusted_at < now() FROM retention_state")


async def test_leftovers_are_removed(settings: Settings, house: House) -> None:
    connection = house.connection
    pending = await house.result(age=HOUR, state="pending")
    ended = await house.result(age=200 * DAY)
    fresh = await house.result(age=HOUR)
    for identifier in (pending, ended, UUID(UNKNOWN_ID)):
        await connection.execute(
            """INSERT INTO result_chunks (result_id, attempt, "offset", text)
               VALUES ($1, 1, 0, 'x'), ($1, 2, 0, 'x')""",
            identifier,
        )
    for identifier in (ended, fresh):
        await connection.execute(
            """INSERT INTO webhook_deliveries (result_id, team_id, url, state, finished_at)
               SELECT id, team_id, 'x', 'delivered', finished_at FROM results WHERE id = $1""",
            identifier,
        )
    await connection.execute(
        """INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)
           SELECT gen_random_uuid(), 'h', 1, now(), now() - make_interval(days => d)
           FROM generate_series(1, 10) AS d"""
    )
    await connection.execute(
        """INSERT INTO rate_buckets (team_id, model_name, name, level, filled_at)
           VALUES ('a', 'm', 'x', 1, now()), ('b', 'm', 'x', 1, now() - interval '2 d')"""
    )
    await connection.execute(
        """INSERT INTO launches (id, team_id, name, provider, profile, model, spec, state, ended_at)
           SELECT gen_random_uuid(), 't', 'n' || d, 'p', 'p', 'm', '{}', 'stopped',
             now() - make_interval(days => d) FROM unnest(ARRAY[10, 100]) AS d"""
    )
    await connection.execute(
        """INSERT INTO model_downloads (id, team_id, profile, model, revision, state, ended_at)
           SELECT gen_random_uuid(), 't', 'p', 'm' || d, 'main', 'failed',
             now() - make_interval(days => d) FROM unnest(ARRAY[10, 100]) AS d"""
    )
    await look(settings)
    left = {"result_chunks": 2, "webhook_deliveries": 1, "workers": 6, "rate_buckets": 1}
    left |= {"launches": 1, "model_downloads": 1}
    for table, count in left.items():
        assert await connection.fetchval(f"SELECT count(*) FROM {table}") == count, table
    assert await house.left() == {pending, ended, fresh}


async def test_the_index_of_words_is_built_anew_once_most_of_it_is_gone(
    settings: Settings, house: House
) -> None:
    context, worker = await house.context(age=3 * DAY), UUID(UNKNOWN_ID)
    await house.connection.execute(
        """WITH added AS (
             INSERT INTO results (id, context_id, model_name, parameters, deadline_at, state, finished_at,
               output, worker_id)
             SELECT (left($1::text, 24) || lpad(to_hex(n), 12, '0'))::uuid, $2, 'm', '{}', now(),
               'completed', now() - interval '2 d', 'x', $3
             FROM generate_series(1, 1500) AS n RETURNING id)
           INSERT INTO result_search SELECT id, 'default', to_tsvector('simple', md5(id::text)) FROM added""",
        str(house.id_of(2 * DAY)), context, worker,
    )  # fmt: skip
    # As an interrupted building leaves it.
    await house.connection.execute(
        "CREATE INDEX ix_result_search_words_ccnew ON result_search USING gin (words)"
    )
    await house.connection.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_result_search_words_ccnew'::regclass"
    )
    node = "SELECT relfilenode FROM pg_class WHERE relname = 'ix_result_search_words'"
    before = await house.connection.fetchval(node)
    await house.connection.execute("VACUUM (ANALYZE) result_search")
    await look(settings, results=DAY)
    assert not await house.left()
    assert await house.connection.fetchval(node) != before
    names = await house.connection.fetch(
        "SELECT indexname FROM pg_indexes WHERE indexname ~ '^ix_result_search_words'"
    )
    assert [row["indexname"] for row in names] == ["ix_result_search_words"]
    assert await house.connection.fetchval("SELECT words_gone FROM retention_state") == 0


def test_the_command_sets_a_teams_word(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((host, port),) = settings.database_addresses()
    for name, value in {
        "LLM_DATABASE_URL": f"{host}:{port}",
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["team", "retain", "acme", "--results", "30d", "--prompts", "forever"]) == 0
    assert main(["team", "list"]) == 0
    assert "2592000s" in (shown := capsys.readouterr().out)
    assert "forever" in shown
    assert main(["team", "retain", "acme"]) == 0
    assert main(["team", "list"]) == 0
    assert "acme" not in capsys.readouterr().out
    for wrong in ("1s", "x", "-1d", "nand", ""):
        with pytest.raises(SystemExit):
            main(["team", "retain", "acme", "--results", wrong])
    assert "60 seconds" in capsys.readouterr().err


async def test_a_held_prompt_is_erased_by_a_later_pass(
    settings: Settings, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark of judged results stays before it, also when the pages behind it are whole."""
    monkeypatch.setattr(retention, "MAX_ROWS", 2)  # of a page
    contexts = [await house.context(age=5 * DAY) for _ in range(9)]
    for number, context in enumerate(contexts):
        await house.result(context, age=(2 + number / 10) * DAY)
    held = contexts[-1]  # of the oldest result: in the first page
    async with house.connection.transaction():
        await house.connection.execute("SELECT FROM contexts WHERE id = $1 FOR KEY SHARE", held)
        await look(settings, prompts=DAY)
    kept = "SELECT count(*) FROM contexts WHERE erased_at IS NULL"
    assert await house.connection.fetchval(kept) == 1
    await look(settings, prompts=DAY)
    assert await house.connection.fetchval(kept) == 0
