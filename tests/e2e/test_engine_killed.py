"""vLLM's engine killed in the middle of texts: they are continued, and equal to undisturbed ones."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from app.cli.up import processes
from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from app.inference.triton_messages import Delta
from app.worker.backends.triton_backend import Generation
from tests.conftest import Service
from tests.e2e.conftest import engines
from tests.integration.support import read

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

MAX_TOKENS = 400
KILLED_AT = 100
PROMPTS = ["def ", "import os\n", "class Reader:\n", '"""The '] * 2


@pytest.fixture
def vllm_settings(vllm_settings: Settings) -> Settings:
    """Text comes often: between two deliveries a fast engine would end."""
    return vllm_settings.model_copy(update={"flush_seconds": 0.05})


async def send_all(service: Service) -> list[str]:
    parameters = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    body = [{"model": "demo", "content": prompt, "parameters": parameters} for prompt in PROMPTS]
    answer = await service.client.post("/results/", json=body)
    assert answer.status_code == 202, answer.text
    return [result["id"] for result in answer.json()]


async def ended(service: Service, ids: list[str]) -> list[dict[str, Any]]:
    return [await read(service, one, wait=60) for one in ids]


async def test_texts_of_a_killed_engine_are_continued(
    vllm_service: Service, vllm_server: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = await ended(vllm_service, await send_all(vllm_service))
    heard = Counter[str]()
    count_tokens = Generation._count_tokens

    are_far = asyncio.Event()

    def count(attempt: Generation, delta: Delta) -> None:
        heard[str(attempt.claim.id)] += delta.completion_tokens
        count_tokens(attempt, delta)
        if len(heard) == len(PROMPTS) and min(heard.values()) >= KILLED_AT and not are_far.is_set():
            processes.kill(engines())  # at once: a fast engine is soon at the end
            are_far.set()

    monkeypatch.setattr(Generation, "_count_tokens", count)
    ids = await send_all(vllm_service)
    await asyncio.wait_for(are_far.wait(), 60)
    await vllm_server.start()
    results = await ended(vllm_service, ids)
    assert [(one["state"], one["attempt"], one["continued"]) for one in results] == [
        ("completed", 2, 1)
    ] * len(PROMPTS)
    assert {one["usage"]["completion_tokens"] for one in results} == {MAX_TOKENS}
    assert [one["result"] for one in results] == [one["result"] for one in undisturbed]
    assert sum(heard.values()) - MAX_TOKENS * len(PROMPTS) < 100  # generated twice
