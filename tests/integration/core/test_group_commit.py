"""Group commit: batches, whole groups, one bad row, lost connections, callers that leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import asyncpg
import pytest

from app.core.database import Connection, Database
from app.core.errors import DatabaseUnavailableError
from app.core.group_commit import Batcher
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.enqueue import NewContext
from app.queue.job_queue import JobQueue
from app.results.contexts import ContextStore
from tests.conftest import make_settings
from tests.integration.support import until
from tests.postgres import PostgresServer

INSERT = "INSERT INTO words SELECT unnest($1::int[]) ON CONFLICT DO NOTHING"


class Recorder:
    """A statement that records its batches, can be held, and answers each item with its square."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.resent: list[bool] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.before: Callable[[Connection], Awaitable[None]] | None = None
        self.after: Callable[[Connection], Awaitable[None]] | None = None

    async def __call__(
        self, connection: Connection, items: Sequence[int], resent: bool
    ) -> Sequence[int]:
        self.batches.append(list(items))
        self.resent.append(resent)
        await self.gate.wait()
        if self.before:
            await self.before(connection)
        await connection.execute(INSERT, items)
        if self.after:
            await self.after(connection)
        return [item * item for item in items]


@pytest.fixture
def database_settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name, database_timeout_seconds=5.0)


@pytest.fixture
async def database(database_settings: Settings) -> AsyncIterator[Database]:
    async with Database(database_settings, "test") as database:
        await database.run(
            lambda connection: connection.execute(
                "CREATE TABLE words (word int PRIMARY KEY CHECK (word > 0))"
            )
        )
        yield database


@pytest.fixture
def statement() -> Recorder:
    return Recorder()


def make_lane(
    database: Database, statement: Recorder, max_items: int = 100, retry_seconds: float = 5.0
) -> Batcher[int, int]:
    async def named(connection: Connection, items: Sequence[int], resent: bool) -> Sequence[int]:
        return await statement(connection, items, resent)

    return Batcher(database, named, max_items=max_items, retry_seconds=retry_seconds)


async def words(database: Database) -> list[int]:
    return [row["word"] for row in await database.fetch("SELECT word FROM words ORDER BY word")]


async def test_what_arrives_during_a_commit_is_the_next_batch(
    database: Database, statement: Recorder
) -> None:
    lane = make_lane(database, statement)
    statement.gate.clear()
    first = asyncio.create_task(lane.submit(1))
    await until_batches(statement, 1)
    others = [asyncio.create_task(lane.submit(item)) for item in range(2, 51)]
    await asyncio.sleep(0)  # they stand in line now
    statement.gate.set()
    assert await first == 1
    assert await asyncio.gather(*others) == [item * item for item in range(2, 51)]
    assert statement.batches == [[1], list(range(2, 51))]
    assert await words(database) == list(range(1, 51))


async def test_answers_come_in_order_of_the_items(database: Database, statement: Recorder) -> None:
    lane = make_lane(database, statement, max_items=7)
    items = [9, 3, 7, 1, 8, 2, 6]
    assert await lane.submit_all(items) == [item * item for item in items]
    answers = await asyncio.gather(*(lane.submit_all([n, n + 1]) for n in range(10, 40, 2)))
    assert answers == [[n * n, (n + 1) ** 2] for n in range(10, 40, 2)]
    assert max(map(len, statement.batches)) <= 7


async def test_groups_stay_whole(database: Database, statement: Recorder) -> None:
    lane = make_lane(database, statement, max_items=10)
    groups = [list(range(start, start + 4)) for start in range(1, 41, 4)]
    large = list(range(100, 130))  # more than a batch holds: it goes alone, in one statement
    await asyncio.gather(*(lane.submit_all(group) for group in [*groups, large]))
    for group in [*groups, large]:
        assert sum(set(group) <= set(batch) for batch in statement.batches) == 1
    assert large in statement.batches


async def test_one_bad_row_is_its_owners_alone(database: Database, statement: Recorder) -> None:
    lane = make_lane(database, statement)
    statement.gate.clear()
    first = asyncio.create_task(lane.submit(1))
    await until_batches(statement, 1)
    rest: list[Awaitable[object]] = [
        asyncio.create_task(lane.submit(0 if item == 33 else item)) for item in range(2, 66)
    ]
    pair = asyncio.create_task(lane.submit_all([70, -1, 71]))
    await asyncio.sleep(0)
    statement.gate.set()
    assert await first == 1
    answers = await asyncio.gather(*rest, pair, return_exceptions=True)
    wrong = [place for place, answer in enumerate(answers) if isinstance(answer, Exception)]
    assert wrong == [31, 64]
    assert all(isinstance(answers[place], asyncpg.CheckViolationError) for place in wrong)
    assert await words(database) == [n for n in range(1, 66) if n != 33]


async def test_an_argument_that_cannot_be_encoded_is_its_owners_alone(
    database: Database, statement: Recorder
) -> None:
    lane = make_lane(database, statement)
    answers = await asyncio.gather(
        *(lane.submit(item) for item in (1, 2**40, 3)), return_exceptions=True
    )
    assert answers[0] == 1
    assert answers[2] == 9
    assert isinstance(answers[1], asyncpg.DataError)
    assert await words(database) == [1, 3]


async def test_a_connection_lost_before_the_statement_is_retried(
    database: Database, statement: Recorder
) -> None:
    lane = make_lane(database, statement)

    async def die_once(connection: Connection) -> None:
        if len(statement.batches) == 1:
            await terminate(database, connection)

    statement.before = die_once
    assert await lane.submit(5) == 25
    assert statement.resent == [False, True]
    assert await words(database) == [5]


async def test_a_connection_lost_after_the_commit_doubles_nothing(
    database: Database, statement: Recorder
) -> None:
    lane = make_lane(database, statement)

    async def die_once(connection: Connection) -> None:
        if len(statement.batches) == 1:
            await terminate(database, connection)
            await connection.execute("SELECT 1")  # finds the connection gone: the answer is lost

    statement.after = die_once
    assert await lane.submit_all([5, 6]) == [25, 36]
    assert statement.resent == [False, True]
    assert await words(database) == [5, 6]


@pytest.mark.trial
async def test_connections_killed_again_and_again(database: Database, statement: Recorder) -> None:
    """Two hundred callers while every other statement loses its connection: no caller sees it."""
    lane = make_lane(database, statement, max_items=3)

    async def die_every_other_time(connection: Connection) -> None:
        if len(statement.batches) % 2:
            await terminate(database, connection)
            await connection.execute("SELECT 1")

    statement.after = die_every_other_time
    items = list(range(1, 61))
    answers = await asyncio.gather(*(lane.submit(item) for item in items))
    assert answers == [item * item for item in items]
    assert await words(database) == items


async def test_a_bad_row_after_a_lost_connection(database: Database, statement: Recorder) -> None:
    """Splitting a batch that was re-sent must still pass that fact to each half."""
    lane = make_lane(database, statement)
    statement.gate.clear()
    first = asyncio.create_task(lane.submit(1))
    await until_batches(statement, 1)
    rest = [asyncio.create_task(lane.submit(item)) for item in (2, 0, 4)]
    await asyncio.sleep(0)

    async def die_once(connection: Connection) -> None:
        if len(statement.batches) == 2:
            await terminate(database, connection)

    statement.before = die_once
    statement.gate.set()
    assert await first == 1
    answers = await asyncio.gather(*rest, return_exceptions=True)
    assert [answers[0], answers[2]] == [4, 16]
    assert isinstance(answers[1], asyncpg.CheckViolationError)
    assert statement.resent[:2] == [False, False]
    assert all(statement.resent[2:])


async def test_a_database_that_stays_away_is_told_in_time(
    postgres_server: PostgresServer, database_name: str, statement: Recorder
) -> None:
    settings = make_settings(postgres_server, database_name)
    nowhere = settings.model_copy(update={"database_host": "127.0.0.1:1"})
    async with Database(nowhere, "test") as database:
        lane = make_lane(database, statement, retry_seconds=0.3)
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(lane.submit(n) for n in (1, 2)), return_exceptions=True)
        assert all(isinstance(answer, DatabaseUnavailableError) for answer in answers)
        assert asyncio.get_running_loop().time() - began < 20
        with pytest.raises(DatabaseUnavailableError):  # and the lane is not stuck
            await lane.submit(3)


async def test_a_caller_that_leaves_disturbs_nobody(
    database: Database, statement: Recorder
) -> None:
    lane = make_lane(database, statement)
    statement.gate.clear()
    first = asyncio.create_task(lane.submit(1))
    await until_batches(statement, 1)
    leaving = asyncio.create_task(lane.submit(2))
    staying = asyncio.create_task(lane.submit(3))
    await asyncio.sleep(0)
    first.cancel()  # its statement is under way
    leaving.cancel()
    await asyncio.wait([first, leaving])
    statement.gate.set()
    assert await staying == 9
    assert sorted(await words(database)) == [1, 2, 3]  # items are committed all the same
    assert await lane.submit(4) == 16


async def test_no_wake_up_is_lost(database: Database, statement: Recorder) -> None:
    """Callers that arrive in the very step in which the lane runs dry are served."""
    lane = make_lane(database, statement)

    async def again_and_again(start: int) -> None:
        for item in range(start, start + 50):
            assert await asyncio.wait_for(lane.submit(item), 30) == item * item
            if item % 3 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*(again_and_again(1000 * n) for n in range(1, 9)))
    assert len(await words(database)) == 400


async def test_a_cancelled_lane_fails_its_callers_and_lives_again(
    database: Database, statement: Recorder
) -> None:
    lane = make_lane(database, statement)
    statement.gate.clear()
    waiting = asyncio.create_task(lane.submit(1))
    await until_batches(statement, 1)
    runner = next(task for task in asyncio.all_tasks() if task.get_name().startswith("lane "))
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    statement.gate.set()
    assert await lane.submit(2) == 4


async def test_contexts_with_one_bad_row(database: Database, database_settings: Settings) -> None:
    """The real statement: text that the door would have refused fails its own context only."""
    store = ContextStore(database, JobQueue(database, database_settings), database_settings)
    contents = [f"text {n}" for n in range(20)]
    contents[7] = "a\0b"
    contexts = [NewContext(new_id(), "default", content, None, "{}") for content in contents]
    answers = await asyncio.gather(*map(store.create, contexts), return_exceptions=True)
    failed = [place for place, one in enumerate(answers) if isinstance(one, BaseException)]
    assert failed == [7]
    stored = await store.list("default", None, 100)
    assert {context.id for context in stored.rows} == {
        context.id for place, context in enumerate(contexts) if place != 7
    }


async def until_batches(statement: Recorder, count: int) -> None:
    async def has_begun() -> bool:
        return len(statement.batches) >= count

    await until(has_begun)


async def terminate(database: Database, connection: Connection) -> None:
    """Have the server end a connection that the lane holds."""
    pid = connection.get_server_pid()
    await database.fetch("SELECT pg_terminate_backend($1, 5000)", pid)
