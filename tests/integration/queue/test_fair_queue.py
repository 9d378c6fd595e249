"""The order of the queue: priority, then a fair share between teams, then age; running limits."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from uuid import UUID

import asyncpg
import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.queue.claim import LOCK_QUEUE
from app.queue.enqueue import NewContext, NewResult
from app.queue.finish import AttemptOutcome
from app.queue.team_limits import ANY_MODEL, Limits, TeamLimits
from tests.conftest import connect, make_settings
from tests.integration.queue.queue_bench import Bench, ended, make_result
from tests.integration.support import until
from tests.postgres import PostgresServer


@pytest.fixture
def queue_settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name)


@pytest.fixture
async def bench(queue_settings: Settings) -> AsyncIterator[Bench]:
    async with Database(queue_settings, "test") as database:
        connection = await connect(queue_settings)
        await connection.execute("INSERT INTO models (name) VALUES ('m')")
        yield Bench(database, queue_settings, connection)
        await connection.close()


async def add(bench: Bench, team: str, count: int, **members: object) -> list[UUID]:
    """Enqueue results of a team in one statement."""
    results: list[NewResult] = []
    for _ in range(count):
        made = make_result(team_id=team, **members)
        context = NewContext(made.context_id, team, "a prompt", None, "{}")
        results.append(
            make_result(team_id=team, context_id=context.id, new_context=context, **members)
        )
    for start in range(0, count, 1000):
        assert all(await bench.queue.enqueue(results[start : start + 1000]))
    return [result.id for result in results]


async def order(bench: Bench, worker: UUID, count: int = 1000) -> list[str]:
    """The teams of what is claimed one by one."""
    teams = []
    for _ in range(count):
        claims = await bench.claim(worker, 1)
        if not claims:
            break
        teams.append((await bench.row(claims[0].id))["team_id"])
    return teams


async def test_a_team_that_comes_late_is_served_next_to_one_with_a_backlog(bench: Bench) -> None:
    await add(bench, "a", 50)
    await add(bench, "b", 3)
    served = await order(bench, await bench.worker())
    # At most one of the others goes first each time.
    assert [place for place, team in enumerate(served) if team == "b"] == [1, 3, 5]


async def test_shares_follow_the_weights(bench: Bench) -> None:
    await add(bench, "a", 30, limits=Limits(weight=1.0))
    await add(bench, "b", 30, limits=Limits(weight=3.0))
    served = await order(bench, await bench.worker(), 20)
    assert 14 <= served.count("b") <= 16


async def test_a_statement_with_rows_of_several_teams_shares_as_well(bench: Bench) -> None:
    results = [make_result() for _ in range(20)]
    mixed = []
    for place, made in enumerate(results):
        team = "a" if place < 18 else "b"
        context = NewContext(made.context_id, team, "a prompt", None, "{}")
        mixed.append(make_result(team_id=team, context_id=context.id, new_context=context))
    assert all(await bench.queue.enqueue(mixed))
    served = await order(bench, await bench.worker())
    assert [place for place, team in enumerate(served) if team == "b"] == [1, 3]


async def test_within_a_team_the_oldest_goes_first_and_priority_before_all(bench: Bench) -> None:
    first = await add(bench, "a", 3)
    urgent = await add(bench, "b", 1, priority=5)
    late = await add(bench, "a", 1, priority=-1)
    worker = await bench.worker()
    claimed = [(await bench.claim(worker, 1))[0].id for _ in range(5)]
    assert claimed == [*urgent, *first, *late]


@pytest.mark.trial
async def test_a_cancelled_backlog_leaves_no_penalty(bench: Bench) -> None:
    await add(bench, "a", 10_000)
    await add(bench, "b", 5)
    assert await bench.queue.cancel("a", model_name="m") == 10_000
    (again,) = await add(bench, "a", 1)
    served = await bench.claim(await bench.worker(), 2)
    assert again in {claim.id for claim in served}


async def test_a_rescued_result_goes_to_the_front(bench: Bench) -> None:
    (lost,) = await add(bench, "a", 1)
    worker = await bench.worker()
    (claim,) = await bench.claim(worker, 1)
    # Meanwhile the queue has served others, and restarted its clock.
    await add(bench, "b", 20)
    await bench.claim(worker, 20)
    await add(bench, "b", 20)
    assert await bench.end(worker, ended(claim, AttemptOutcome.RETURNED)) == [True]
    await bench.fast_forward()
    assert [one.id for one in await bench.claim(worker, 1)] == [lost]


async def test_no_teams_first_waits_longer_than_its_share(bench: Bench) -> None:
    """Ten teams with long queues: an eleventh's single result is among the next eleven."""
    for team in range(10):
        await add(bench, f"team {team}", 200)
    worker = await bench.worker()
    await bench.claim(worker, 137)
    await add(bench, "late", 1)
    assert "late" in await order(bench, worker, 11)


# --- how much of a team runs -----------------------------------------------------------------------


@pytest.fixture
async def limits(bench: Bench, queue_settings: Settings) -> TeamLimits:
    """The limits that the bench's queue claims by."""
    return bench.queue._limits


async def teams_of(connection: asyncpg.Connection, ids: Sequence[UUID]) -> list[str]:
    rows = await connection.fetch("SELECT team_id FROM results WHERE id = ANY($1::uuid[])", ids)
    return sorted(row["team_id"] for row in rows)


async def test_a_team_runs_no_more_than_it_may(bench: Bench, limits: TeamLimits) -> None:
    await limits.set("a", ANY_MODEL, {"max_running": 3})
    await limits.refresh()
    await add(bench, "a", 10)
    await add(bench, "b", 10)
    worker = await bench.worker()
    claims = await bench.claim(worker, 8)
    assert await teams_of(bench.connection, [one.id for one in claims]) == ["a"] * 3 + ["b"] * 5
    assert (
        await teams_of(bench.connection, [one.id for one in await bench.claim(worker, 100)])
        == ["b"] * 5
    )
    of_a = [one for one in claims if await teams_of(bench.connection, [one.id]) == ["a"]]
    await bench.end(worker, ended(of_a[0]))
    assert await teams_of(bench.connection, [one.id for one in await bench.claim(worker, 100)]) == [
        "a"
    ]


async def test_a_limit_holds_before_a_process_has_read_it(bench: Bench, limits: TeamLimits) -> None:
    """A claim that began before the change came to its process starts no more than the limit."""
    await limits.set("a", ANY_MODEL, {"max_running": 1})
    first, _ = await add(bench, "a", 2)
    worker = await bench.worker()
    assert await bench.claim(worker) == []
    await limits.refresh()
    assert [claim.id for claim in await bench.claim(worker)] == [first]


async def test_workers_that_claim_at_once_share_the_limit(bench: Bench, limits: TeamLimits) -> None:
    await limits.set("a", "m", {"max_running": 5})
    await limits.refresh()
    await add(bench, "a", 100)
    workers = [await bench.worker() for _ in range(6)]
    claimed = await asyncio.gather(*(bench.claim(worker, 4) for worker in workers))
    assert sum(len(claims) for claims in claimed) == 5


async def test_the_default_limit_holds_for_every_team(
    bench: Bench, queue_settings: Settings
) -> None:
    settings = queue_settings.model_copy(update={"team_max_running": 2})
    limits = TeamLimits(bench.database, settings)
    await limits.set("rich", ANY_MODEL, {"max_running": 4})
    await limits.refresh()
    bench.queue._limits = limits
    for team in ("a", "b", "rich"):
        await add(bench, team, 6)
    claims = await bench.claim(await bench.worker(), 100)
    assert await teams_of(bench.connection, [one.id for one in claims]) == (
        ["a"] * 2 + ["b"] * 2 + ["rich"] * 4
    )


async def until_a_claim_waits(bench: Bench) -> None:
    """Wait for a claim that waits for the lock of its model's queue."""
    await until(
        lambda: bench.connection.fetchval(
            """SELECT true FROM pg_locks JOIN pg_database d ON d.oid = database
               WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"""
        )
    )


async def test_a_claim_that_must_wait_for_another_holds_up_no_other_model(
    bench: Bench, limits: TeamLimits
) -> None:
    await limits.set("a", "n", {"max_running": 1})
    await limits.refresh()
    (free,) = await add(bench, "a", 1)
    await bench.add(team_id="a", model_name="n")
    worker = await bench.worker()
    async with bench.connection.transaction():
        await bench.connection.execute(LOCK_QUEUE, "n")
        claims = bench.queue.claims(worker, {"m": 5, "n": 5})
        assert [claim.id for claim in await anext(claims)] == [free]
        waiting = asyncio.ensure_future(anext(claims))
        await until_a_claim_waits(bench)
        assert not waiting.done()
    assert [claim.model_name for claim in await waiting] == ["n"]


async def test_an_attempt_that_waited_for_a_free_place_starts_after_the_one_before(
    bench: Bench, limits: TeamLimits
) -> None:
    """The claim begins, and the place gets free while it waits for the lock of its queue."""
    await limits.set("a", ANY_MODEL, {"max_running": 1})
    await limits.refresh()
    first, second = await add(bench, "a", 2)
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    async with bench.connection.transaction():
        await bench.connection.execute(LOCK_QUEUE, "m")
        claiming = asyncio.create_task(bench.claim(worker))
        await until_a_claim_waits(bench)
        assert await bench.end(worker, ended(claim)) == [True]
    assert [one.id for one in await claiming] == [second]
    assert (await bench.row(first))["finished_at"] < (await bench.row(second))["started_at"]


async def test_a_suspect_that_waited_for_its_model_starts_after_the_one_before(
    bench: Bench,
) -> None:
    """The same for a result that runs alone."""
    first, suspect = await add(bench, "a", 2)
    worker = await bench.worker()
    (claim,) = await bench.claim(worker, 1)
    await bench.connection.execute("UPDATE results SET engine_deaths = 2 WHERE id = $1", suspect)
    async with bench.connection.transaction():
        await bench.connection.execute(LOCK_QUEUE, "m")
        claiming = asyncio.create_task(bench.queue.claim_suspects(worker, ["m"]))
        await until_a_claim_waits(bench)
        assert await bench.end(worker, ended(claim)) == [True]
    assert [one.id for one in await claiming] == [suspect]
    assert (await bench.row(first))["finished_at"] < (await bench.row(suspect))["started_at"]


async def test_a_claim_that_waited_leaves_no_more_time_than_the_deadline(
    bench: Bench, limits: TeamLimits
) -> None:
    """Its seconds count from the claim, and not from when it began to wait."""
    await limits.set("a", ANY_MODEL, {"max_running": 1})
    await limits.refresh()
    (result_id,) = await add(bench, "a", 1)
    worker = await bench.worker()
    async with bench.connection.transaction():
        await bench.connection.execute(LOCK_QUEUE, "m")
        claiming = asyncio.create_task(bench.claim(worker))
        await until_a_claim_waits(bench)
        released_at = await bench.connection.fetchval("SELECT clock_timestamp()")
    (claim,) = await claiming
    deadline_at = (await bench.row(result_id))["deadline_at"]
    assert claim.seconds_left < (deadline_at - released_at).total_seconds()


async def test_priority_precedes_virtual_time_under_running_limits(
    bench: Bench, limits: TeamLimits
) -> None:
    await limits.set("red", ANY_MODEL, {"max_running": 10})
    await limits.refresh()
    await add(bench, "red", 1, priority=0)
    await add(bench, "blue", 2, priority=5)  # the second is a step behind red's
    worker = await bench.worker()
    assert await order(bench, worker) == ["blue", "blue", "red"]
