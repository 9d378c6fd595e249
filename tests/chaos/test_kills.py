"""kill -9 in the middle of 500 results: of each process in turn, which is then started again."""

import asyncio
import signal

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import (
    SPEAKING,
    MortalPostgres,
    MortalTriton,
    Stack,
    ask_directly,
    check_completed,
    revive,
)

# Also a Triton that hangs and is restarted has its time (see `finish`).
pytestmark = pytest.mark.timeout(300)

COUNT = 150
# Five seconds each; the last thirty are sent while the victim is dead.
PROMPTS = [f"Victim {number} {{{{chunks=12 delay_ms=400}}}}" for number in range(COUNT)]
BEFORE = 120
IN_FLIGHT = 75  # at least, when the victim is killed


@pytest.fixture(scope="module")
def expected(triton: EmbeddedTriton) -> dict[str, str]:
    """The model's output for each prompt."""
    return asyncio.run(ask_directly(triton, PROMPTS))


async def begin(stack: Stack) -> dict[str, str]:
    """Start results and wait for some text; returns the ids of all that were sent."""
    await stack.start_worker("alice")
    accepted = await stack.send(PROMPTS[:BEFORE])
    await stack.until(SPEAKING, IN_FLIGHT, 60)
    return accepted


async def finish(stack: Stack, accepted: dict[str, str], expected: dict[str, str]) -> None:
    # Most of a minute until a Triton that hangs counts as dead and is restarted.
    await stack.until_terminal(150)
    await check_completed(stack, accepted, expected)
    await check_history(stack)
    check_logs(stack)


async def test_worker(stack: Stack, expected: dict[str, str]) -> None:
    accepted = await begin(stack)
    worker = stack.workers["alice"]
    worker.send_signal(signal.SIGKILL)
    accepted |= await stack.send(PROMPTS[BEFORE:])
    await revive(worker)
    await finish(stack, accepted, expected)
    if stack.triton_deaths:  # of the streams that broke with the worker; `finish` is what counts
        return
    # A result that ran when the worker died has an attempt more; a later one does not.
    assert await stack.count("attempt = 2 AND lost_attempts = 1") >= IN_FLIGHT
    assert await stack.count("attempt = 1 AND lost_attempts = 0") >= COUNT - BEFORE
    assert await stack.count("attempt > 2") == 0


async def test_api(stack: Stack, expected: dict[str, str]) -> None:
    """It dies at the moment that a client receives an id, with other POSTs under way."""
    accepted = await begin(stack)

    async def send_in_turn(prompts: list[str]) -> None:
        for prompt in prompts:
            while True:
                try:
                    accepted[await stack.send_one(prompt)] = prompt
                    break
                except ConnectionError:  # a client that received no id sends again
                    await asyncio.sleep(0.1)
            if len(accepted) == (BEFORE + COUNT) // 2:
                stack.api.send_signal(signal.SIGKILL)

    senders = [send_in_turn(PROMPTS[BEFORE + first :: 10]) for first in range(10)]
    await asyncio.gather(revive(stack.api), *senders)
    await finish(stack, accepted, expected)
    # The worker does not notice. Rows whose ids no client received may exist, and end like the others.
    assert await stack.count("attempt = 1 AND state = 'completed'") == await stack.count("true")


async def test_tritonserver(
    mortal_stack: Stack, mortal_triton: MortalTriton, expected: dict[str, str]
) -> None:
    accepted = await begin(mortal_stack)
    mortal_triton.kill_server()
    late = asyncio.create_task(mortal_stack.send(PROMPTS[BEFORE:]))
    await revive(mortal_triton)
    accepted |= await late
    await finish(mortal_stack, accepted, expected)
    assert await mortal_stack.count("lost_attempts = 1") >= IN_FLIGHT
    # The late ones found no server, or a dying one: none of them was lost twice.
    assert await mortal_stack.count("lost_attempts > 1") == 0


async def test_stub(
    mortal_stack: Stack, mortal_triton: MortalTriton, expected: dict[str, str]
) -> None:
    """Triton itself leaves the streams of a dead stub hanging, and reports itself as ready."""
    accepted = await begin(mortal_stack)
    mortal_triton.kill_stub()
    late = asyncio.create_task(mortal_stack.send(PROMPTS[BEFORE:]))
    await revive(mortal_triton)
    accepted |= await late
    await finish(mortal_stack, accepted, expected)
    assert await mortal_stack.count("lost_attempts = 1") >= IN_FLIGHT
    assert await mortal_stack.count("lost_attempts > 1") == 0


async def test_postgresql(
    mortal_stack: Stack, mortal_postgres: MortalPostgres, expected: dict[str, str]
) -> None:
    # No client sees an error: the API waits for the database within its own bound, which is longer
    # here than the start of a database on a machine that stalls.
    await mortal_stack.restart_api(LLM_DATABASE_TIMEOUT_SECONDS="60")
    accepted = await begin(mortal_stack)
    mortal_postgres.send_signal(signal.SIGKILL)
    late = asyncio.create_task(mortal_stack.send(PROMPTS[BEFORE:]))
    await revive(mortal_postgres)
    accepted |= await late
    await finish(mortal_stack, accepted, expected)
    assert await mortal_stack.count("true") == COUNT
    assert await mortal_stack.count("lost_attempts = 0") == COUNT
