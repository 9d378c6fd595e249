"""Works for the two sides of a schedule: transitions of the queue."""

from typing import Any
from uuid import UUID

from app.queue.claim import Claim, claim_within_limits
from app.queue.enqueue import NewResult
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.team_limits import RunningLimits
from tests.integration.queue.queue_bench import LOST, MODEL, Bench, ended
from tests.integration.queue.schedules.scheduler import Process, Work

TEAM = "default"
WEBHOOK = "https://example.org/hook"


def claiming(worker: UUID, count: int = 100) -> Work:
    return lambda process: process.claim(worker, count)


def cancelling(result_id: UUID) -> Work:
    return lambda process: process.queue.cancel(TEAM, id=result_id)


def ending(claim: Claim, worker: UUID, outcome: AttemptOutcome = AttemptOutcome.COMPLETED) -> Work:
    failure = None if outcome is AttemptOutcome.COMPLETED else LOST
    return lambda process: process.end(worker, ended(claim, outcome, failure=failure))


def enqueueing(*results: NewResult) -> Work:
    return lambda process: process.queue.enqueue(results)


def within_limits(worker: UUID, free: int = 100, most: int = 1) -> Work:
    async def work(process: Process) -> list[Claim]:
        return await process.database.run(
            lambda one: claim_within_limits(
                one, worker, MODEL, free, RunningLimits(most, {}), continues=True
            )
        )

    return work


async def expiring(process: Process) -> int:
    return await process.queue.expire()


async def rescuing(process: Process) -> int:
    return await process.queue.rescue(0.0)


def lost(claim: Claim) -> AttemptEnd:
    return ended(claim, AttemptOutcome.LOST, failure=LOST)


async def running(bench: Bench, **members: Any) -> tuple[UUID, UUID, Claim]:
    """A result, and the worker that runs it; the worker's lease is over with `lease=0`."""
    worker = await bench.worker(members.pop("lease", 60.0))
    (result_id,) = await bench.add(**members)
    (claim,) = await bench.claim(worker)
    return result_id, worker, claim


async def facts(bench: Bench, result_id: UUID) -> tuple[Any, ...]:
    """State, owner, attempt and error of a result."""
    row = await bench.row(result_id)
    return row["state"], row["worker_id"], row["attempt"], row["error_code"]
