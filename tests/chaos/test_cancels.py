"""Cancellations that race completions: one of them wins, for all clients."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.http_client import Answer
from tests.chaos.stack import PARAMETERS, Stack, until
from tests.chaos.stream_client import StreamReader
from tests.triton_streams import call

ROUNDS = 60
RACES = 50
READ = 5  # streams of each round
CHUNKS, DELAY = 4, 0.02
_QUIET_SECONDS = 0.5


@pytest.mark.timeout(240)
async def test_cancels_race_completions_of_a_worker(stack: Stack, triton: EmbeddedTriton) -> None:
    """50 at a time, 60 times over."""
    await stack.start_worker("alice")
    chosen = random.Random(7)  # noqa: S311 - not for secrets
    outcomes: Counter[str] = Counter()
    takes = CHUNKS * DELAY
    middle = 1.4 * takes
    for number in range(ROUNDS):
        prompt = f"Race {number} {{{{chunks={CHUNKS} delay_ms={DELAY * 1000}}}}}"
        body = [{"model": "scripted", "content": prompt, "parameters": PARAMETERS}] * RACES
        answer = await stack.client.post("/results/", body)
        ids = [str(item["id"]) for item in answer.json]
        readers = [StreamReader(one) for one in ids[:READ]]
        # About when they complete: some long before, most in that very moment.
        pauses = [max(0.0, chosen.gauss(middle, takes / 2)) for _ in ids]
        cancels = [cancel(stack, one, pause) for one, pause in zip(ids, pauses, strict=True)]
        reads = [reader.read_to_the_end(lambda: stack.ports["api"]) for reader in readers]
        answers, _ = await asyncio.wait_for(
            asyncio.gather(asyncio.gather(*cancels), asyncio.gather(*reads)), 60
        )
        answered = {answer.json["id"]: answer.json for answer in answers}
        stored = {result["id"]: result for result in await stack.read(ids)}
        # The response to the cancellation stays true.
        assert answered == stored
        for reader in readers:
            reader.check_end()
            assert reader.result == stored[reader.result_id]
        ended = Counter(outcome_of(result) for result in stored.values())
        outcomes.update(ended)
        # A busy machine takes longer: the cancels follow.
        middle *= 1.1 if ended["cancelled"] > RACES / 2 else 1 / 1.1
    assert set(outcomes) == {"completed", "cancelled"}
    assert min(outcomes.values()) > ROUNDS * RACES / 20, outcomes
    await check_history(stack)
    check_logs(stack)
    await until(lambda: is_quiet(triton), 30, "the engine is idle")


async def cancel(stack: Stack, result_id: str, pause: float) -> Answer:
    await asyncio.sleep(pause)  # the moment that is tried, before or after the end
    answer = await stack.client.post(f"/results/{result_id}/cancel", None)
    assert answer.status == 200, answer
    return answer


def outcome_of(result: dict[str, Any]) -> str:
    """Return True if it completed, with all of its text, or was cancelled, with the beginning of it."""
    if result["state"] == "completed":
        assert result["usage"]["completion_tokens"] == CHUNKS
        assert result["finish_reason"] == "stop"
        return "completed"
    assert result["finish_reason"] == "cancelled"
    return str(result["error"]["code"])


async def is_quiet(triton: EmbeddedTriton) -> bool:
    """Return True if the model is silent for a while: a request that was not stopped would go on."""
    before = await responses(triton)
    await asyncio.sleep(_QUIET_SECONDS)  # only time shows silence
    return bool(await responses(triton) == before)


async def responses(triton: EmbeddedTriton) -> Any:
    """Triton's count of the model's outputs."""
    asked = pb.ModelStatisticsRequest(name="scripted")
    (stats,) = (await call(triton, "ModelStatistics", asked)).model_stats
    return stats.response_stats
