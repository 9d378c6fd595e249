"""vLLM's engine killed in the middle of texts: they are continued, and equal to undisturbed ones."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from app.core.settings import Settings
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import NotTakenError, StreamLostError
from app.inference.triton_messages import Delta
from app.worker.backends.triton_backend import Generation
from tests.chaos.stack import MortalTriton
from tests.conftest import Service
from tests.e2e.session_client import open_session
from tests.integration.support import read, until

pytestmark = pytest.mark.timeout(300)

MAX_TOKENS = 400
KILLED_AT = 100
PROMPTS = ["def ", "import os\n", "class Reader:\n", '"""The '] * 2
PROMPT = "import os\n\n\ndef "
STREAMS = 8
SHORT = {"max_tokens": 1}
LONG = {"max_tokens": 1000, "ignore_eos": True}


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
    vllm_service: Service, vllm_triton: MortalTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams and a session that others have with the engine end by themselves, with the reason."""
    undisturbed = await ended(vllm_service, await send_all(vllm_service))
    heard = Counter[str]()
    count_tokens = Generation._count_tokens
    are_far = asyncio.Event()
    begun = [asyncio.Event() for _ in range(STREAMS + 1)]

    def count(attempt: Generation, delta: Delta) -> None:
        heard[str(attempt.claim.id)] += delta.completion_tokens
        count_tokens(attempt, delta)
        have_begun = len(heard) == len(PROMPTS) and all(one.is_set() for one in begun)
        if have_begun and min(heard.values()) >= KILLED_AT and not are_far.is_set():
            vllm_triton.kill_engine()  # at once: a fast engine is soon at the end
            are_far.set()

    monkeypatch.setattr(Generation, "_count_tokens", count)
    async with asyncio.timeout(120), vllm_triton.client() as client, asyncio.TaskGroup() as others:
        for one in begun[1:]:
            others.create_task(lose_a_stream(client, one))
        others.create_task(lose_a_session(vllm_triton, begun[0]))
        ids = await send_all(vllm_service)
        await are_far.wait()
    assert "demo" in await asyncio.wait_for(vllm_triton.wait(), 60)
    await check_reload(vllm_triton)
    results = await ended(vllm_service, ids)
    assert [(one["state"], one["attempt"], one["continued"]) for one in results] == [
        ("completed", 2, 1)
    ] * len(PROMPTS)
    assert {one["usage"]["completion_tokens"] for one in results} == {MAX_TOKENS}
    assert [one["result"] for one in results] == [one["result"] for one in undisturbed]
    assert sum(heard.values()) - MAX_TOKENS * len(PROMPTS) < 100  # generated twice


async def lose_a_stream(client: TritonClient, begun: asyncio.Event) -> None:
    with pytest.raises(StreamLostError):
        await generate(client, LONG, begun)


async def lose_a_session(triton: MortalTriton, begun: asyncio.Event) -> None:
    """It ends by itself: the end of the call waits for that."""
    async with open_session(triton) as session:
        submit = {"prompt": PROMPT, "parameters": LONG}
        await session.send({"submit": submit | {"slot": 1}}, {"submit": submit | {"slot": 2}})
        await session.until(lambda: session.slots[1].tokens and session.slots[2].tokens)
        begun.set()
        for generation in await session.until_ended(1, 2):
            assert generation.error == "UNAVAILABLE: the engine of model demo died"


async def check_reload(triton: MortalTriton) -> None:
    """The model is unloaded by its backend, and loads again."""
    async with triton.client() as client:

        async def is_unloaded() -> bool:
            return not (await client.index())[0].ready

        await until(is_unloaded)
        with pytest.raises(NotTakenError):
            await generate(client, SHORT, asyncio.Event())
        # Loading waits for the end of the unloading that the backend asked for.
        await client.unload("demo")
        await client.load("demo")
        await generate(client, SHORT, asyncio.Event())


async def generate(client: TritonClient, sampling: dict[str, Any], begun: asyncio.Event) -> None:
    async for _ in client.generate("demo", PROMPT, sampling):
        begun.set()
