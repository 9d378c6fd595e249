"""SIGTERM of a worker: what fits its grace period is finished, the rest is handed back."""

import asyncio
import signal

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import SPEAKING, Stack, ask_directly, check_completed
from tests.integration.support import until

SHORT, LONG = 40, 40


@pytest.mark.timeout(240)
async def test_a_stopping_worker_hands_back_what_does_not_fit(
    stack: Stack, triton: EmbeddedTriton
) -> None:
    short = [f"Short {number} {{{{chunks=8 delay_ms=250}}}}" for number in range(SHORT)]
    long = [f"Long {number} {{{{chunks=120 delay_ms=250}}}}" for number in range(LONG)]
    late = ["Late {{chunks=1}}"]
    asking = asyncio.create_task(ask_directly(triton, short + long + late))
    leaving = await stack.start_worker("alice", LLM_SHUTDOWN_GRACE_SECONDS="12")
    accepted = await stack.send(short + long)
    await stack.until(f"({SPEAKING}) OR state = 'completed'", SHORT + LONG, 60)
    leaving.send_signal(signal.SIGTERM)
    await until(lambda: asyncio.sleep(0, "stopping: " in leaving.log_file.read_text()))
    accepted |= await stack.send(late)
    assert await leaving.wait() == "ended with status 0"

    # All is handed back by the time it has gone: no lease has to run out.
    assert await stack.count("worker_id IS NOT NULL AND state = 'pending'") == 0
    assert await stack.count("attempt = 1 AND state = 'completed'") == SHORT
    assert await stack.count("attempt = 1 AND state = 'pending'") == LONG
    handed_back = """SELECT FROM history WHERE operation = 'UPDATE' AND new_worker IS NULL
                     AND old_worker IS NOT NULL AND writer = 'alice'"""
    assert len(await stack.fetch(handed_back)) == LONG

    await stack.start_worker("bob")
    await stack.until_terminal(120)
    await check_completed(stack, accepted, await asking)
    assert await stack.count("attempt = 2") == LONG
    # Nothing of this counts as an attempt.
    failed = "jsonb_path_exists(attempt_history, '$[*] ? (@.error != null)')"
    assert await stack.count(f"lost_attempts > 0 OR {failed}") == 0
    # Results with text go on behind it.
    assert await stack.count("continuations = 1") > 0
    # Results after the SIGTERM waited for the other worker.
    claims = "SELECT FROM history WHERE old_attempt = 0 AND new_attempt = 1 AND writer = 'bob'"
    assert len(await stack.fetch(claims)) == len(late)
    await check_history(stack)
    check_logs(stack)
