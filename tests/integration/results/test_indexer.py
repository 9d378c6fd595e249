"""Each ended result is counted once and can be found, after any death and with any text."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from app.core.database import Database
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results import indexer as digest_module
from app.results.indexer import ResultIndexer
from app.results.search import team_word
from app.results.stats import histogram
from tests.conftest import Service, connect, migrate
from tests.integration.support import finish, send, until
from tests.postgres import PostgresServer

RESULTS = """
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at, state, output,
  started_at, first_token_at, finished_at, prompt_tokens, completion_tokens, store, kind)
SELECT id, $3, $2, 'm', '{}', now(), 'completed', $4, now(), now(), now(), 2, 3, $5, $6
FROM unnest($1::uuid[]) AS i(id)
"""
FOUND = "SELECT result_id FROM result_search WHERE words @@ websearch_to_tsquery('simple', $1)"
COUNTED_FIRST = "counting, pg_catalog, public"
COUNTING = """
CREATE SCHEMA counting
  CREATE SEQUENCE parses;
CREATE FUNCTION counting.to_tsvector(regconfig, text) RETURNS tsvector IMMUTABLE COST 100 LANGUAGE plpgsql
AS 'BEGIN PERFORM nextval(''counting.parses''); RETURN pg_catalog.to_tsvector($1, $2); END';
"""
COUNTED = "SELECT coalesce(sum(results), 0)::int FROM minute_stats"


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    async with Database(settings, "test") as database:
        yield database


@pytest.fixture
def digest(database: Database, settings: Settings) -> ResultIndexer:
    """No indexer runs except the test."""
    return ResultIndexer(database, QueueDepth(database, settings), settings)


async def add(
    connection: asyncpg.Connection, count: int = 1, *, team: str = "default", prompt: str = "prompt",
    output: str = "text", store: bool = True, kind: str = "generation", ended: bool = True,
) -> Sequence[UUID]:  # fmt: skip
    """Completed results of one context, as their last statement leaves them."""
    context_id, ids = new_id(), [new_id() for _ in range(count)]
    await connection.execute(
        "INSERT INTO contexts (id, team_id, content) VALUES ($1, $2, $3)", context_id, team, prompt
    )
    await connection.execute(RESULTS, ids, context_id, team, output, store, kind)
    if ended:
        await connection.execute(
            "INSERT INTO undigested_results (result_id) SELECT unnest($1::uuid[])", ids
        )
    return ids


async def look_again(digest: ResultIndexer) -> None:
    """As it does every few seconds."""
    digest._looked_at = -1e9
    await digest.step()
    await digest.words.index()


async def found(connection: asyncpg.Connection, words: str) -> list[UUID]:
    return [row[0] for row in await connection.fetch(FOUND, words)]


async def test_what_ends_is_found_and_counted(
    service: Service, connection: asyncpg.Connection
) -> None:
    done = await finish(service, "a quaint prompt {{chunks=3}}")
    overdue = await finish(service, "another", deadline_seconds=0.0001)
    cancelled = await send(service, "a third {{chunks=100 delay_ms=500}}", model="scripted")
    await service.client.post(f"/results/{cancelled['id']}/cancel")

    # The walk over older results may find these first; then they leave the queue a moment later.
    async def counted() -> bool:
        left = await connection.fetchval("SELECT count(*) FROM undigested_results")
        return bool(left == 0 and await connection.fetchval(COUNTED) == 3)

    await until(counted)
    for result, words in ((done, "QUAINT"), (overdue, "deadline passed"), (cancelled, "third")):
        assert [str(one) for one in await found(connection, words)] == [result["id"]]
    rows = await connection.fetch("SELECT * FROM minute_stats ORDER BY ended_as")
    assert [row["ended_as"] for row in rows] == ["cancelled", "completed", "deadline_exceeded"]
    completed = next(row for row in rows if row["ended_as"] == "completed")
    assert completed["completion_tokens"] == done["usage"]["completion_tokens"] == 3
    for name in ("queue_seconds", "first_token_seconds", "seconds"):
        assert sum(completed[name]) == completed["results"]


async def test_what_is_not_to_be_stored_leaves_no_words(
    digest: ResultIndexer, connection: asyncpg.Connection
) -> None:
    await add(connection, store=False, output="secret", prompt="secret")
    await add(connection, kind="attribution", output='{"secret": 1}', prompt="secret")
    kept = await add(connection, output="secret", prompt="secret")
    await digest.index()
    assert await found(connection, "secret") == list(kept)
    assert await connection.fetchval("SELECT count(*) FROM result_search WHERE words IS NULL") == 2
    assert await connection.fetchval(COUNTED) == 3


async def test_results_of_one_context_each_have_its_words_and_their_own(
    digest: ResultIndexer, connection: asyncpg.Connection
) -> None:
    """The words of the context are found once, and each result has them, with places as in one text."""
    first, second, hidden, *others = await add(connection, 5, prompt="a shared prompt")
    await connection.execute("UPDATE results SET output = 'one answer' WHERE id = $1", first)
    await connection.execute("UPDATE results SET output = 'another answer' WHERE id = $1", second)
    await connection.execute("UPDATE results SET store = false WHERE id = $1", hidden)
    await add(connection, prompt="a foreign prompt", output="one answer")
    await digest.index()
    shown = [first, second, *others]
    assert sorted(await found(connection, '"shared prompt"')) == sorted(shown)
    assert await found(connection, '"prompt one answer" shared') == [first]
    assert await found(connection, '"prompt another answer"') == [second]
    assert await connection.fetchval(COUNTED) == 6
    assert await connection.fetchval(
        """SELECT bool_and(words = to_tsvector('simple', concat_ws(E'\\n', c.content, r.output))
             || array_to_tsvector(ARRAY[$1])) FROM result_search s
           JOIN results r ON r.id = s.result_id JOIN contexts c ON c.id = r.context_id WHERE r.store""",
        team_word("default"),
    )


async def test_a_long_context_is_parsed_once_for_all_of_its_results(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """A function in the place of PostgreSQL's counts the parses; the planner sees no difference."""
    await connection.execute(
        f"ALTER DATABASE {settings.database_name} SET search_path = {COUNTED_FIRST}"
    )
    await connection.execute(COUNTING)
    for prompt in ("a shared prompt", "another"):
        await add(connection, 20, prompt=prompt + " of many words" * 200)
    async with Database(settings, "test") as database:
        await ResultIndexer(database, QueueDepth(database, settings), settings).index()
    assert len(await found(connection, "shared")) == 20
    assert await connection.fetchval("SELECT last_value FROM counting.parses") == 2 + 40


async def test_words_go_with_the_result_and_with_its_context(
    digest: ResultIndexer, connection: asyncpg.Connection, api: Service
) -> None:
    first, second, third = [(await add(connection, output="gone"))[0] for _ in range(3)]
    await digest.index()
    assert (await api.client.delete(f"/results/{first}")).status_code == 204
    context = await connection.fetchval("SELECT context_id FROM results WHERE id = $1", second)
    assert (await api.client.delete(f"/contexts/{context}")).status_code == 204
    assert await found(connection, "gone") == [third]
    await connection.execute("UPDATE results SET store = false")
    await api.services.erasure.erase([third])
    assert await found(connection, "gone") == []
    assert await connection.fetchval(COUNTED) == 3


async def test_a_result_that_is_deleted_first_is_passed_over(
    digest: ResultIndexer, connection: asyncpg.Connection
) -> None:
    (gone,) = await add(connection)
    await add(connection)
    await connection.execute("DELETE FROM results WHERE id = $1", gone)
    await digest.index()
    assert await connection.fetchval("SELECT count(*) FROM undigested_results") == 0
    assert await connection.fetchval(COUNTED) == 1


async def test_a_result_that_is_held_is_digested_later(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    held, free = await add(connection, 2)
    other = await connect(settings)
    async with other.transaction():
        await other.execute("SELECT FROM results WHERE id = $1 FOR UPDATE", held)
        await digest.index()
        assert await found(connection, "text") == [free]
    await other.close()
    await look_again(digest)
    assert set(await found(connection, "text")) == {held, free}
    assert await connection.fetchval(COUNTED) == 2


async def test_a_commit_that_comes_late_is_digested_and_the_clock_does_not_matter(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    other = await connect(settings)
    async with other.transaction():
        (late,) = await add(other, output="late")
        await other.execute("UPDATE results SET finished_at = now() - interval '3 h'")
        await add(connection)
        await digest.index()
        assert await connection.fetchval(COUNTED) == 1
    await other.close()
    await digest.index()
    assert await found(connection, "late") == []  # it stands behind those that are done
    await look_again(digest)
    assert await found(connection, "late") == [late]
    assert await connection.fetchval(COUNTED) == 2


async def test_two_digests_and_a_walk_at_once_count_once(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    for _ in range(5):
        await add(connection, 300)
    others = [Database(settings, "test") for _ in range(3)]
    for other in others:
        await other.__aenter__()
    digests = [digest, *(ResultIndexer(other, digest._depth, settings) for other in others)]
    await connection.execute("UPDATE digest_state SET resumes_at = now() - interval '1 h'")

    async def is_done() -> bool:
        for one in digests:
            one._place = 0
        await asyncio.gather(
            *(one.index() for one in digests), *(one.index_older() for one in digests)
        )
        return not await connection.fetchval("SELECT count(*) FROM undigested_results")

    await until(is_done)
    assert await connection.fetchval(COUNTED) == 1500
    assert await connection.fetchval("SELECT count(*) FROM result_search") == 1500
    for other in others:
        await other.__aexit__()


async def test_a_digest_that_dies_in_the_middle_is_as_if_it_had_not_begun(
    digest: ResultIndexer, connection: asyncpg.Connection, settings: Settings
) -> None:
    await add(connection, 20)
    stop = await connect(settings)
    async with stop.transaction():
        # It has written the words, and waits for the minutes.
        await stop.execute("LOCK TABLE minute_stats IN EXCLUSIVE MODE")
        dying = asyncio.create_task(digest.index())
        await until(
            lambda: connection.fetchval(
                "SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'minute_stats'::regclass"
            )
        )
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
    await stop.close()
    assert await connection.fetchval("SELECT count(*) FROM result_search") == 0
    assert await connection.fetchval("SELECT count(*) FROM usage_entries") == 0
    assert await connection.fetchval("SELECT count(*) FROM undigested_results") == 20

    async def is_done() -> bool:
        await digest.index()  # its lock ends with its connection
        return bool(await connection.fetchval(COUNTED) == 20)

    await until(is_done)
    assert await connection.fetchval("SELECT sum(results) FROM usage_entries") == 20


async def test_older_results_are_walked_through_newest_first_and_once_more_a_day_later(
    digest: ResultIndexer, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_module, "_MAX_ROWS", 100)
    digest._max_rows = 100
    ids = await add(connection, 250, ended=False)
    await connection.execute(
        "UPDATE results SET finished_at = now() - interval '40 d' WHERE id = ANY($1)", ids[:50]
    )
    due = "UPDATE digest_state SET resumes_at = now()"
    assert await digest.index_older()
    await digest.words.index()
    assert set(await found(connection, "text")) == set(ids[150:])
    assert not await digest.index_older()  # it pauses
    for _ in range(2):
        await connection.execute(due)
        assert await digest.index_older()
        await digest.words.index()
    assert await connection.fetchval(COUNTED) == 200  # the others' days are over
    assert len(await found(connection, "text")) == 250
    await connection.execute(due)
    assert not await digest.index_older()
    late = await add(connection, ended=False, output="late")  # by a process of the version before
    assert not await digest.index_older()
    for _ in range(5):
        await connection.execute(due)
        await digest.index_older()
    await digest.words.index()
    assert await found(connection, "late") == list(late)
    assert await connection.fetchval(COUNTED) == 201
    assert await connection.fetchval("SELECT passes_left FROM digest_state") == 0


WORDS = [
    "word " * 60_000,
    " ".join(f"w{number}" for number in range(1_000_000)),
    " ".join(f"a-{number}.b/{number}?c={number}" for number in range(40_000)),
    "".join(f"{chr(0x20000 + number % 40_000)}{chr(0x20000 + number // 7)} " for number in range(40_000)),
    "x" * 300_000,
    "\u0001\u202e\ufffd\ufeff\u0000".replace("\u0000", "") + "\U0010ffff" * 1000,
    "e\u0301 \u1100\u1161 \u200d\u200c' \\ '' :* !& | <-> \"",
    "",
]  # fmt: skip


async def test_no_text_is_too_much(digest: ResultIndexer, connection: asyncpg.Connection) -> None:
    """Each is digested, together and with the others; the first words of each can be found."""
    for place, text in enumerate(WORDS):
        await add(connection, output=f"mark{place} {text}", prompt=text)

    async def is_done() -> bool:
        return not await digest.index()

    await until(is_done)
    assert await connection.fetchval(COUNTED) == len(WORDS)
    for place in range(len(WORDS)):
        assert len(await found(connection, f"mark{place}")) == 1, place


async def test_rows_that_no_request_makes_do_not_stop_it(
    digest: ResultIndexer, connection: asyncpg.Connection
) -> None:
    (odd,) = await add(connection)
    await connection.execute(
        """UPDATE contexts SET content = NULL, messages = '{"content": "x"}';
           UPDATE results SET id = 'ffffffff-ffff-ffff-ffff-fffffffffffe';
           UPDATE undigested_results SET result_id = 'ffffffff-ffff-ffff-ffff-fffffffffffe'"""
    )
    await add(connection)
    await digest.index()
    assert await connection.fetchval(COUNTED) == 2
    assert odd not in await found(connection, "text")


async def test_minutes_are_forgotten_and_queues_sampled(
    api: Service, connection: asyncpg.Connection
) -> None:
    services = api.services
    depth = QueueDepth(services.database, services.settings)  # it has counted nothing yet
    digest = ResultIndexer(services.database, depth, services.settings)
    for _ in range(3):
        await send(api, "waits")
    for days in (29, 31):
        await connection.execute(
            """INSERT INTO minute_stats SELECT 'default', now() - make_interval(days => $1), 'm', n, 1,
                 1, 1, '{}', '{}', '{}' FROM generate_series(1, 1100) AS n""",
            days,
        )
        await connection.execute(
            "INSERT INTO queue_samples SELECT now() - make_interval(days => $1), 'q', 1, 1", days
        )
    for _ in itertools.repeat(None, 3):
        await digest.step()
    assert await connection.fetchval(COUNTED) == 1100
    rows = await connection.fetch("SELECT name, queued, running FROM queue_samples ORDER BY minute")
    assert [tuple(row) for row in rows] == [("q", 1, 1), ("scripted", 3, 0)]


def test_the_migration_keeps_what_is_there(
    postgres_server: PostgresServer, settings: Settings
) -> None:
    async def work(statement: str) -> Any:
        connection = await connect(settings)
        try:
            if statement == "add":
                return await add(connection, 3, ended=False)
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    migrate(settings, "0010", down=True)
    asyncio.run(work("add"))
    migrate(settings)
    assert asyncio.run(work("SELECT count(*) FROM results")) == 3
    assert asyncio.run(work("SELECT passes_left FROM digest_state")) == 2
    migrate(settings, "0010", down=True)
    assert asyncio.run(work("SELECT count(*) FROM results")) == 3


def test_percentiles_are_read_from_buckets() -> None:
    counts = [0] * histogram.SIZE
    assert histogram.percentile(counts, 0.5) is None
    for milliseconds in range(1, 1001):
        counts[histogram.bucket_of(milliseconds / 1000)] += 1
    for share in (0.05, 0.5, 0.95):
        value = histogram.percentile(counts, share)
        assert value is not None
        assert abs(value - share) < 0.1 * share
    counts = [0] * histogram.SIZE
    for seconds in (-5.0, 0.0, 1e9):
        counts[histogram.bucket_of(seconds)] += 1
    assert (counts[0], counts[-1]) == (2, 1)
    assert histogram.percentile(counts, 1.0) == histogram.BOUNDS[-1]
