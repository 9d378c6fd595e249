"""A request that kills the model's process each time it runs, among harmless ones."""

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import MortalTriton, Stack, ask_directly, check_completed, kept_running

ATTEMPTS = 3
INNOCENT = 12


@pytest.mark.parametrize("chunks", [0, 2])
async def test_poison_fails_and_the_other_results_complete(
    mortal_stack: Stack, mortal_triton: MortalTriton, triton: EmbeddedTriton, chunks: int
) -> None:
    innocent = [f"Harmless {number} {{{{chunks=8 delay_ms=100}}}}" for number in range(INNOCENT)]
    expected = await ask_directly(triton, innocent)
    poison = f"Poison {{{{chunks=8 delay_ms=100 crash_at={chunks}}}}}"
    await mortal_stack.start_worker("alice", LLM_MAX_ATTEMPTS=str(ATTEMPTS))

    async with kept_running(mortal_triton):
        accepted = await mortal_stack.send([*innocent, poison])
        await mortal_stack.until_terminal(90)

    (poisoned,) = [result_id for result_id, prompt in accepted.items() if prompt == poison]
    del accepted[poisoned]
    await check_completed(mortal_stack, accepted, expected)
    (result,) = await mortal_stack.read([poisoned])
    assert result["state"] == "failed"
    error = result["error"]
    assert (error["code"], error["retryable"]) == ("engine_crashed", False)
    assert result["attempt"] >= ATTEMPTS
    assert await mortal_stack.count(f"lost_attempts = {ATTEMPTS}") == 1
    # The last crash had no company: no other result was in flight at three.
    assert await mortal_stack.count("engine_deaths >= 3") == 1
    await check_history(mortal_stack)
    check_logs(mortal_stack)
