"""Times of retention to the microsecond, one statement each: a cutoff is due itself."""

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from app.core.ids import lowest_id, new_id
from app.core.settings import Settings
from app.results.retention import cleanup, retention, sql
from app.results.retention.policy import FOREVER, Kept, _merge
from tests.integration.results.test_retention import DAY, HOUR, House, look

TICK = timedelta(microseconds=1)
PERIOD = 60.0
MOST = 300.0  # seconds that the trusted time advances at once


@pytest.fixture
async def rows(connection: asyncpg.Connection) -> House:
    return House(connection, await connection.fetchval("SELECT now()"))


async def ids(rows: House, statement: str, *arguments: object) -> set[UUID]:
    return {row["id"] for row in await rows.connection.fetch(statement, *arguments)}


async def test_one_process_has_a_pass_in_each_period(rows: House) -> None:
    """Also after the clock was set back by more than a period."""
    begun = rows.now
    steps = [
        (timedelta(0), True),
        (timedelta(0), False),
        (timedelta(seconds=PERIOD) - TICK, False),
        (timedelta(seconds=PERIOD), True),
        (timedelta(0), False),  # behind the last one by a period
        (-TICK, True),
    ]
    for after, is_begun in steps:
        now = begun + after
        passes = await rows.connection.fetch(sql.BEGIN, now, PERIOD, MOST)
        cleans = await rows.connection.fetch(sql.BEGIN_CLEANING, now, PERIOD)
        assert (bool(passes), bool(cleans)) == (is_begun, is_begun), after


async def test_the_trusted_time_follows_the_clock_by_steps(rows: House) -> None:
    async def trusted_at(seconds: float) -> float:
        await rows.connection.execute("UPDATE retention_state SET looked_at = NULL")
        now = rows.now + timedelta(seconds=seconds)
        (row,) = await rows.connection.fetch(sql.BEGIN, now, PERIOD, MOST)
        trusted: datetime = row["trusted_at"]
        return (trusted - rows.now).total_seconds()

    clock = (0, 200, 1_000, 1_000, 1_000, 100)
    assert [await trusted_at(one) for one in clock] == [0, 200, 500, 800, 1_000, 100]


async def test_a_page_has_the_results_of_one_team_between_two_ids(rows: House) -> None:
    found = sorted([await rows.result(age=age * DAY) for age in (5, 4, 3, 2)])
    await rows.result(age=4 * DAY, team="blue")
    for first, last, expected in ((0, 3, found[1:3]), (0, 2, found[1:2])):
        page = await rows.connection.fetch(sql.PAGE, "default", found[first], found[last], 9)
        assert [row["id"] for row in page] == expected
    limits = lowest_id(rows.now - timedelta(days=99)), lowest_id(rows.now)
    page = await rows.connection.fetch(sql.PAGE, "default", *limits, 2)
    assert [row["id"] for row in page] == found[:2]


async def test_results_with_a_time_of_their_own_come_in_its_order(rows: House) -> None:
    later, sooner, same = [
        await rows.result(age=HOUR, retain=seconds) for seconds in (HOUR, HOUR - 60, HOUR)
    ]
    first, second = sorted([later, same])
    await rows.result(age=HOUR, retain=HOUR + 1e-6)
    await rows.result(age=HOUR)
    place: tuple[datetime, UUID] = (rows.now - timedelta(days=99), new_id())
    order: list[UUID] = []
    while page := await rows.connection.fetch(sql.EXPIRED, rows.now, *place, 1):
        order.append(page[0]["id"])
        place = page[0]["expires_at"], page[0]["id"]
    assert order == [sooner, first, second]


async def test_a_page_of_results_ends_at_its_last_one(
    settings: Settings, rows: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next page begins behind its time and its id, although earlier results have higher ids."""
    monkeypatch.setattr(retention, "MAX_ROWS", 2)
    await rows.result(age=HOUR, retain=HOUR - 60)
    for hours in (3, 2):
        await rows.result(age=hours * HOUR, retain=hours * HOUR)
    await look(settings)
    assert await rows.left() == set()


async def deletable(rows: House, *wanted: UUID, cutoff: datetime | None) -> set[UUID]:
    return await ids(rows, sql.DELETABLE, list(wanted), cutoff, rows.now, "default")


async def test_a_result_is_due_at_its_teams_time_or_at_its_own(rows: House) -> None:
    due, own, young = [
        await rows.result(age=age, retain=retain)
        for age, retain in ((DAY, None), (HOUR, HOUR), (DAY - 1e-6, DAY))
    ]
    other = await rows.result(age=DAY)
    cutoff = rows.now - timedelta(seconds=DAY)
    assert await deletable(rows, due, own, young, cutoff=cutoff) == {due, own}
    assert await deletable(rows, due, own, young, cutoff=None) == {own}
    assert other in await rows.left()


async def test_only_a_result_that_is_over_is_deleted(rows: House) -> None:
    """It has ended, is counted, and owes no delivery; so have its attributions and its group."""
    delivered, owed, uncounted, pending = [
        await rows.result(age=DAY, counted=counted, state=state)
        for counted, state in ((True, "completed"),) * 2 + ((False, "completed"), (True, "pending"))
    ]
    for identifier, state in ((delivered, "delivered"), (owed, "pending")):
        await rows.connection.execute(
            """INSERT INTO webhook_deliveries (result_id, team_id, url, state, finished_at)
               VALUES ($1, 'default', 'x', $2::text,
                 CASE WHEN $2::text = 'delivered' THEN now() END)""",
            *(identifier, state),
        )
    source, busy = await rows.result(age=DAY), await rows.result(age=DAY)
    await rows.result(age=HOUR, kind="attribution", source=source)
    await rows.result(age=HOUR, kind="attribution", source=busy, state="pending")
    whole, half = new_id(), new_id()
    grouped = [await rows.result(age=DAY, group=whole) for _ in range(2)]
    split = await rows.result(age=DAY, group=half)
    await rows.result(age=HOUR, group=half)
    everything = list(await rows.left())
    cutoff = rows.now - timedelta(seconds=DAY)
    assert await deletable(rows, *everything, cutoff=cutoff) == {delivered, source, *grouped}
    assert {uncounted, pending, split} <= set(everything)


async def test_a_running_batch_holds_the_results_of_its_lines(rows: House) -> None:
    lines = [(state, await rows.result(age=DAY)) for state in ("sent", "waiting", "done")]
    finished = await rows.result(age=DAY)
    foreign = await rows.result(age=DAY)
    for team, state, held in (
        ("default", "in_progress", lines),
        ("default", "completed", [("sent", finished)]),
        ("blue", "in_progress", [("sent", foreign)]),
    ):
        batch = new_id()
        await rows.connection.execute(
            """INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, state,
                 expires_at, ended_at) VALUES ($1, $2, 'x', $3, '24h', $4::text, now(),
                 CASE WHEN $4::text = 'completed' THEN now() END)""",
            *(batch, team, new_id(), state),
        )
        for number, (line_state, result) in enumerate(held):
            await rows.connection.execute(
                """INSERT INTO batch_lines (batch_id, line, state, result_ids, custom_id, body,
                     is_completed, outcome)
                   SELECT $1, $2, $3::text, ARRAY[$4::uuid], 'x', '{}',
                     CASE WHEN $3::text = 'done' THEN true END,
                     CASE WHEN $3::text = 'done' THEN '{}' END""",
                *(batch, number, line_state, result),
            )
    cutoff = rows.now - timedelta(seconds=DAY)
    found = await deletable(rows, *(await rows.left()), cutoff=cutoff)
    assert found == {lines[2][1], finished, foreign}


async def test_a_context_goes_with_the_last_of_its_results(rows: House) -> None:
    """If the time of its prompt is over, or its prompt is erased."""
    last, shared, young, erased, running = [await rows.context() for _ in range(5)]
    gone = [await rows.result(context, age=DAY) for context in (last, shared)]
    gone += [await rows.result(context, age=HOUR) for context in (young, erased)]
    gone.append(await rows.result(running, age=DAY))
    await rows.result(last, age=DAY, kind="attribution", source=gone[0])
    await rows.result(shared, age=DAY)
    await rows.result(running, age=DAY, kind="attribution", source=gone[4], state="pending")
    await rows.connection.execute(
        "UPDATE contexts SET erased_at = now(), content = '' WHERE id = $1", erased
    )
    contexts = [last, shared, young, erased, running]
    for cutoff, expected in (
        (rows.now - timedelta(seconds=DAY), {last, erased}),
        (rows.now - timedelta(seconds=DAY) - TICK, {erased}),
        (None, {erased}),
    ):
        assert await ids(rows, sql.LOCK_LAST, contexts, gone, cutoff) == expected


async def test_a_prompt_is_due_with_the_last_of_its_results(rows: House) -> None:
    cutoff = rows.now - timedelta(seconds=DAY)
    due, half, pending, young, erased, never = [await rows.context() for _ in range(6)]
    for context, age, state in (
        (due, DAY, "completed"), (due, 2 * DAY, "failed"), (half, DAY, "completed"),
        (half, HOUR, "completed"), (pending, DAY, "pending"), (young, DAY - 1e-6, "completed"),
        (erased, DAY, "completed"),
    ):  # fmt: skip
        await rows.result(context, age=age, state=state)
    await rows.connection.execute(
        "UPDATE contexts SET erased_at = now(), content = '' WHERE id = $1", erased
    )
    contexts = [due, half, pending, young, erased, never]
    assert await ids(rows, sql.DUE_PROMPTS, contexts, cutoff) == {due, never}
    changed = await ids(rows, sql.ERASE_CONTEXTS, [*contexts[:3], erased], cutoff, rows.now)
    assert changed == {due}
    found = await rows.connection.fetch("SELECT id, content, erased_at FROM contexts")
    contents = {row["id"]: row["content"] for row in found}
    assert contents == dict.fromkeys(contexts, "a prompt") | {due: "", erased: ""}


async def test_contexts_are_unused_since_a_time(rows: House) -> None:
    cutoff = rows.now - timedelta(seconds=DAY)
    due, young, used, foreign, older = [
        await rows.context(team=team) for team in ("default",) * 3 + ("blue", "default")
    ]
    for context, at in (
        (due, cutoff), (young, cutoff + TICK), (foreign, cutoff), (older, cutoff - TICK)
    ):  # fmt: skip
        await rows.connection.execute(
            "UPDATE contexts SET unused_since = $2 WHERE id = $1", context, at
        )
    page = await rows.connection.fetch(sql.UNUSED, "default", cutoff, 9)
    assert [row["id"] for row in page] == [older, due]
    await rows.connection.execute(sql.FORGET_UNUSED, [due])
    assert await ids(rows, sql.UNUSED, "default", cutoff, 9) == {older}
    assert used in await rows.left("contexts")


async def test_old_records_go_at_their_time(rows: House) -> None:
    """Deliveries by the time of their end, workers unless a pending result names them."""
    connection, cutoff = rows.connection, rows.now - timedelta(days=7)
    deliveries = {}
    for name, age, at in (("due", 9, cutoff), ("young", 9, cutoff + TICK), ("new", 6, cutoff)):
        deliveries[name] = await rows.result(age=age * DAY)
        await connection.execute(
            """INSERT INTO webhook_deliveries (result_id, team_id, url, state, finished_at)
               VALUES ($1, 'default', 'x', 'delivered', $2)""",
            *(deliveries[name], at),
        )
    bounds = UUID(int=0), lowest_id(cutoff), 9, cutoff
    row: Any = await connection.fetchrow(cleanup._DELIVERIES, *bounds)
    assert (row["count"], row["last"]) == (2, max(deliveries["due"], deliveries["young"]))
    left = await connection.fetch("SELECT result_id FROM webhook_deliveries")
    assert {one["result_id"] for one in left} == {deliveries["young"], deliveries["new"]}
    workers = [new_id() for _ in range(4)]
    for identifier, died in zip(workers, (cutoff, cutoff + TICK, cutoff, None), strict=True):
        await connection.execute(
            """INSERT INTO workers (id, host, pid, lease_expires_at, dead_at)
               VALUES ($1, 'h', 1, now(), $2)""",
            *(identifier, died),
        )
    pending = await rows.result(age=DAY, state="pending")
    await connection.execute(
        "UPDATE results SET worker_id = $2, attempt = 1, started_at = now() WHERE id = $1",
        *(pending, workers[2]),
    )
    assert await connection.execute(cleanup._WORKERS, cutoff, 9) == "DELETE 1"
    assert await rows.left("workers") == set(workers[1:])


def test_a_team_may_keep_results_for_ever_although_the_service_does_not() -> None:
    assert [_merge(own, 5.0) for own in (None, 7.0, FOREVER)] == [5.0, 7.0, None]
    kept = [Kept(*one) for one in ((None, None), (1.0, None), (None, 1.0), (1.0, 1.0))]
    assert [one.is_forever for one in kept] == [True, False, False, False]


async def test_a_pass_over_prompts_goes_on_behind_those_that_are_erased(
    settings: Settings, rows: House
) -> None:
    """Up to the first row that is not due."""
    first, second = [await rows.result(age=age * DAY) for age in (4, 3)]
    young = await rows.result(age=HOUR)
    last = await rows.result(age=0)
    for prompts, mark in ((2 * DAY, second), (HOUR - 60, young)):
        await look(settings, prompts=prompts)
        (row,) = await rows.connection.fetch("SELECT * FROM retention_marks")
        assert (row["team_id"], row["prompts_to"]) == ("default", mark)
    assert await rows.left() == {first, second, young, last}
