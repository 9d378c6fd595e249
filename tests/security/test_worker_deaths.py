"""A result that kills its worker is isolated, as one that kills its engine."""

from typing import Any
from uuid import UUID

import pytest

from app.queue.rescue import session_name
from app.queue.suspects import MOST_KILLERS
from tests.integration.queue.queue_bench import MODEL, Bench


async def lose_worker(bench: Bench) -> list[UUID]:
    """Claim all that may run, and let the worker's lease end; the results that ran."""
    worker = await bench.worker(lease_seconds=-1.0)
    claims = await bench.claim(worker) or await bench.queue.claim_suspects(worker, [MODEL])
    assert await bench.queue.release([worker]) == len(claims)
    return [claim.id for claim in claims]


async def test_a_result_that_kills_its_worker_runs_alone_next(bench: Bench) -> None:
    poison, *innocent = await bench.add(3)
    for _ in range(3):  # the first death raises no suspicion: it may be an operator's
        assert set(await lose_worker(bench)) == {poison, *innocent}
    later = await bench.add(2)
    for _ in range(2):
        await bench.fast_forward()  # between both, the others have their turn
        assert await lose_worker(bench) == [poison]
    row = await bench.row(poison)
    assert (row["state"], row["error_code"]) == ("failed", "worker_lost")
    for result_id in [*innocent, *later]:
        row = await bench.row(result_id)
        assert (row["state"], row["worker_id"]) == ("pending", None)


async def test_a_worker_that_is_cut_off_raises_no_suspicion(bench: Bench) -> None:
    """Its connection is still there; a worker that stops raises none either."""
    (result_id,) = await bench.add()
    worker = await bench.worker(lease_seconds=-1.0)
    heartbeat = await bench.database.connect(session_name(worker))
    await bench.claim(worker)
    assert await bench.queue.release([worker]) == 1
    await heartbeat.close()
    row = await bench.row(result_id)
    assert (row["lost_attempts"], row["engine_deaths"]) == (1, 0)
    worker = await bench.worker()
    await bench.claim(worker)
    assert await bench.queue.retire(worker) == 1
    row = await bench.row(result_id)
    assert (row["lost_attempts"], row["engine_deaths"]) == (1, 0)


async def suspects(bench: Bench, count: int, lost: int = 2, **members: Any) -> list[UUID]:
    found = await bench.add(count, **members)
    await bench.connection.execute(
        "UPDATE results SET engine_deaths = 2, lost_attempts = $2 WHERE id = ANY($1::uuid[])",
        found,
        lost,
    )
    return found


PAUSES = """
SELECT id, extract(epoch FROM not_before - now())::float8 AS seconds FROM results WHERE state = 'pending'
"""


@pytest.mark.parametrize("end", ["rescue", "retirement"])
async def test_the_others_have_the_model_after_a_suspect_killed_its_worker(
    bench: Bench, end: str
) -> None:
    """As long as it held the model, until its worker's death was found; its team's ones wait longer."""
    guilty, next_one = await suspects(bench, 2, team_id="many")
    (foreign,) = await suspects(bench, 1, team_id="one")
    (innocent,) = await bench.add(team_id="one")
    worker = await bench.worker(lease_seconds=-1.0)
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    assert claim.id == guilty
    await bench.connection.execute(
        "UPDATE results SET started_at = started_at - interval '30 s' WHERE id = $1", guilty
    )
    count = bench.queue.release([worker]) if end == "rescue" else bench.queue.retire(worker)
    assert await count == 1

    other = await bench.worker()
    assert await bench.queue.claim_suspects(other, [MODEL]) == []
    assert [one.id for one in await bench.claim(other)] == [innocent]
    pauses = {row["id"]: row["seconds"] for row in await bench.connection.fetch(PAUSES)}
    assert 25.0 < pauses[foreign] < 60.0
    assert all(110.0 < pauses[one] < 240.0 for one in (guilty, next_one))


@pytest.mark.parametrize("others_wait", [True, False])
async def test_suspects_of_a_team_that_killed_engines_often_are_not_tried(
    bench: Bench, *, others_wait: bool
) -> None:
    """Another team's are, and so are its results that were in flight at no two deaths."""
    guilty = await suspects(bench, MOST_KILLERS, lost=4, team_id="many")
    waiting = await suspects(bench, 3, team_id="many")
    (foreign,) = await suspects(bench, 1, team_id="one")
    (elsewhere,) = await suspects(bench, 1, team_id="many", model_name="n")
    later = await bench.add(2, team_id="many") if others_wait else []
    worker = await bench.worker()
    for number, identifier in enumerate(guilty, 1):
        row = await bench.lose(worker, identifier)
        assert row["error_code"] == "engine_crashed"
        assert (await bench.row(waiting[0]))["state"] == "pending", number
        await bench.queue.pause_suspects(MODEL, "many", 2.0)
    for identifier in waiting:
        row = await bench.row(identifier)
        assert (row["state"], row["error_code"]) == ("failed", "engine_crashed")
        assert (row["error_retryable"], row["attempt"]) == (True, 0)
        assert await ends_of(bench, identifier) == 1
    for identifier in [foreign, elsewhere, *later]:
        assert (await bench.row(identifier))["state"] == "pending"
    await bench.fast_forward()
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    assert claim.id == foreign


@pytest.mark.parametrize("change", ["finished_at = now() - interval '61 minutes'", "engine_deaths = 2",
                                    "model_name = 'n'", "team_id = 'one'"])  # fmt: skip
async def test_deaths_long_ago_or_not_alone_or_elsewhere_count_for_nothing(
    bench: Bench, change: str
) -> None:
    guilty = await suspects(bench, MOST_KILLERS, lost=4, team_id="many")
    (waiting,) = await suspects(bench, 1, team_id="many")
    worker = await bench.worker()
    for identifier in guilty:
        await bench.lose(worker, identifier)
    await bench.connection.execute(f"UPDATE results SET {change} WHERE id = $1", guilty[0])
    await bench.queue.pause_suspects(MODEL, "many", 2.0)
    assert (await bench.row(waiting))["state"] == "pending"
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    assert claim.id == waiting


async def ends_of(bench: Bench, result_id: UUID) -> int:
    ends: int = await bench.connection.fetchval(
        "SELECT count(*) FROM undigested_results WHERE result_id = $1", result_id
    )
    return ends
