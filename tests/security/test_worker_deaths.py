"""A result that kills its worker is isolated, as one that kills its engine."""

from uuid import UUID

from app.queue.rescue import session_name
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
