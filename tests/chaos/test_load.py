"""A thousand results at once."""

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import Stack, ask_directly, check_completed

COUNT = 1_000


async def test_a_thousand_results_at_once(stack: Stack, triton: EmbeddedTriton) -> None:
    """All complete, none is lost or doubled, and each output is the model's, byte for byte."""
    prompts = [f"Question {number} {{{{chunks={1 + number % 24}}}}}" for number in range(COUNT)]
    expected = await ask_directly(triton, prompts)
    assert len(set(expected.values())) == COUNT
    await stack.start_worker("alice")

    accepted = await stack.send(prompts)
    await stack.until_terminal(60)

    await check_completed(stack, accepted, expected)
    assert await stack.count("true") == COUNT
    assert await stack.count("attempt = 1 AND lost_attempts = 0") == COUNT
    await check_history(stack)
    check_logs(stack)
