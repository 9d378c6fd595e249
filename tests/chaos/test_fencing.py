"""Processes that freeze, and a database that goes away: who may still write, and what runs again."""

import asyncio
import signal
import time
from uuid import UUID

from app.cli.up.triton import EmbeddedTriton
from app.core.database import Database
from app.core.errors import CANCELLED
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.job_queue import JobQueue
from app.queue.progress import Chunk
from app.worker.lease import Lease
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import (
    LEASE_SECONDS,
    SPEAKING,
    MortalPostgres,
    Stack,
    ask_directly,
    check_completed,
    until,
)
from tests.claims import claim_all
from tests.conftest import make_settings


def prompts_of(seconds: float, count: int) -> list[str]:
    """Prompts whose results take so long."""
    delay = seconds * 1000 / 16
    return [f"{seconds} s: {number} {{{{chunks=16 delay_ms={delay}}}}}" for number in range(count)]


async def test_frozen_worker_writes_nothing(stack: Stack, triton: EmbeddedTriton) -> None:
    """It is frozen for two leases, and continued while another worker runs its results.

    By then the model has sent all of the short ones to it, and goes on with the long ones.
    """
    prompts = prompts_of(LEASE_SECONDS, 30) + prompts_of(3 * LEASE_SECONDS, 30)
    asking = asyncio.create_task(ask_directly(triton, prompts))
    frozen = await stack.start_worker("alice")
    accepted = await stack.send(prompts)
    await stack.until(SPEAKING, len(prompts), 60)
    frozen.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    await stack.start_worker("bob")
    try:
        await stack.until("attempt = 2 AND worker_id IS NOT NULL", len(prompts), 60)
        # Two leases of the frozen process, by the clock of the machine.
        await asyncio.sleep(max(0.0, stopped_at + 2 * LEASE_SECONDS - time.monotonic()))
        assert await stack.count("state = 'pending'") >= 30
    finally:
        frozen.send_signal(signal.SIGCONT)

    async def has_new_id() -> bool:
        return stack.log("alice").count("worker ready") == 2

    await until(has_new_id, 60, "the frozen worker is back under a new id")
    assert "fenced" in stack.log("alice")
    await stack.until_terminal(60)
    await check_completed(stack, accepted, await asking)
    assert await stack.count("attempt = 2 AND lost_attempts = 1") == len(prompts)
    (dead,) = await stack.fetch("SELECT id, dead_at FROM workers WHERE dead_at IS NOT NULL")
    written = "SELECT * FROM history WHERE writer = 'alice' AND at > $1"
    assert not await stack.fetch(written, dead["dead_at"])
    assert await stack.fetch("SELECT FROM history WHERE writer = 'alice'")

    # Under its new id it is a worker like any other.
    await stack.workers["bob"].stop()
    more = prompts_of(0.1, 10)
    accepted = await stack.send(more)
    await stack.until_terminal(60)
    await check_completed(stack, accepted, await ask_directly(triton, more))
    by_old_id = "SELECT FROM history WHERE at > $1 AND $2 IN (old_worker, new_worker)"
    freed = f"{by_old_id} AND new_worker IS NOT NULL"
    assert not await stack.fetch(freed, dead["dead_at"], dead["id"])
    await check_history(stack)
    check_logs(stack)


async def test_a_dead_worker_finds_no_row_to_write(stack: Stack, triton: EmbeddedTriton) -> None:
    """The second line of defence, alone: one that is not fenced ends and appends to nothing."""
    settings = make_settings(
        stack.postgres, stack.database, triton, lease_seconds=1.0, database_user="alice"
    )
    accepted = await stack.send(["Two owners {{chunks=1}}"])
    (result_id,) = [UUID(one) for one in accepted]
    async with Database(settings, "tests") as database:
        queue = JobQueue(database, settings)
        dead, alive = Lease(database, 1.0), Lease(database, 600.0)
        await dead.register()
        assert [claim.attempt for claim in await claim_all(queue, dead.id, {"scripted": 1})] == [1]

        async def is_rescued() -> bool:
            return await stack.count("worker_id IS NULL") == 1

        await until(is_rescued, 60, "the API rescued the result")
        assert await claim_all(queue, dead.id, {"scripted": 1}) == []
        await alive.register()
        assert [claim.attempt for claim in await claim_all(queue, alive.id, {"scripted": 1})] == [2]

        before = len(await stack.fetch("SELECT FROM history"))
        # For all its beliefs about the attempt, its own id and a number that is over are refused.
        for owner, attempt in ((dead.id, 1), (dead.id, 2), (alive.id, 1)):
            await queue.append(owner, [Chunk(result_id, attempt, 0, "stale", 1, 1)])
            ending = queue.end_batcher(owner, retry_seconds=5.0)
            for outcome in AttemptOutcome:
                end = AttemptEnd(result_id, attempt, outcome, "stale", failure=CANCELLED)
                assert await ending.submit(end) is False
        assert len(await stack.fetch("SELECT FROM history")) == before

        end = AttemptEnd(result_id, 2, AttemptOutcome.COMPLETED, "fresh", "stop")
        assert await queue.end_batcher(alive.id, retry_seconds=5.0).submit(end)
    (result,) = await stack.read(accepted)
    assert (result["state"], result["result"]) == ("completed", "fresh")
    await check_history(stack)
    check_logs(stack)


async def test_database_away_for_two_leases_runs_nothing_again(
    mortal_stack: Stack, mortal_postgres: MortalPostgres, triton: EmbeddedTriton
) -> None:
    """Results end before, during and after its absence; each does so in its first attempt."""
    leases = (0.5, 1, 2, 4)
    prompts = [prompt for n in leases for prompt in prompts_of(n * LEASE_SECONDS, 25)]
    asking = asyncio.create_task(ask_directly(triton, prompts))
    await mortal_stack.start_worker("alice")
    accepted = await mortal_stack.send(prompts)
    await mortal_stack.until(SPEAKING, len(prompts) // 2, 60)

    await mortal_postgres.stop()
    await asyncio.sleep(2 * LEASE_SECONDS)  # the outage: longer than any lease
    await mortal_postgres.start()

    assert await mortal_stack.count("state = 'pending'") >= 25
    await mortal_stack.until_terminal(60)
    await check_completed(mortal_stack, accepted, await asking)
    assert await mortal_stack.count("attempt = 1") == len(prompts)
    assert not await mortal_stack.fetch("SELECT FROM workers WHERE dead_at IS NOT NULL")
    await check_history(mortal_stack)
    check_logs(mortal_stack)


async def test_frozen_database_loses_and_doubles_nothing(
    mortal_stack: Stack, mortal_postgres: MortalPostgres, triton: EmbeddedTriton
) -> None:
    """It takes no connection and answers nothing for two leases: the worker fences itself."""
    await mortal_stack.restart_api(LLM_DATABASE_TIMEOUT_SECONDS=str(4 * LEASE_SECONDS))
    leases = (0.5, 1, 3)
    prompts = [prompt for n in leases for prompt in prompts_of(n * LEASE_SECONDS, 25)]
    late = prompts_of(0.5, 10)
    asking = asyncio.create_task(ask_directly(triton, [*prompts, *late]))
    await mortal_stack.start_worker("alice")
    await mortal_stack.start_worker("bob")
    accepted = await mortal_stack.send(prompts)
    await mortal_stack.until(SPEAKING, len(prompts) // 2, 60)

    mortal_postgres.send_signal(signal.SIGSTOP)
    try:
        sending = asyncio.create_task(mortal_stack.send(late))
        await asyncio.sleep(2 * LEASE_SECONDS)  # the outage: longer than any lease
    finally:
        mortal_postgres.send_signal(signal.SIGCONT)

    accepted |= await sending
    await mortal_stack.until_terminal(60)
    await check_completed(mortal_stack, accepted, await asking)
    assert await mortal_stack.count("true") == len(accepted)
    assert "fenced" in mortal_stack.log("alice")
    await check_history(mortal_stack)
    check_logs(mortal_stack)
