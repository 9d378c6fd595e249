"""The main job on real vLLM: the demo model answers in crowds too."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from app.inference.triton_client import TritonClient
from tests.conftest import Service
from tests.integration.support import serve

pytestmark = pytest.mark.timeout(600)

GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
# Logits differ in their last bits with the size of the batch; where two tokens are this close
# (log probability), either may come first.
NEAR_TIE = 0.02


@pytest.mark.slow("a real engine starts: the smoke test of `make test`")
async def test_continues_python(vllm_service: Service) -> None:
    answer = await vllm_service.client.post(
        "/results/",
        json={"model": "demo", "content": "import os\n\n\ndef ", "parameters": {"max_tokens": 40}},
        headers={"Prefer": "wait=60"},
    )
    result = answer.json()
    assert result["state"] == "completed", result
    assert result["result"]
    assert "import os" not in result["result"]
    assert result["usage"]["prompt_tokens"] > 0
    assert 0 < result["usage"]["completion_tokens"] <= 40
    assert result["finish_reason"] in ("stop", "length")
    assert result["model_version"] == 1


async def test_messages_are_rendered_and_counted(vllm_service: Service) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    answer = await vllm_service.client.post(
        "/results/",
        json={"model": "demo", "messages": messages, "parameters": {"max_tokens": 8}},
        headers={"Prefer": "wait=60"},
    )
    result = answer.json()
    assert result["state"] == "completed", result
    model = await vllm_service.services.registry.find("demo")
    assert model.format is not None
    rendered = await model.format.render(messages)
    assert result["usage"]["prompt_tokens"] == await model.format.count_tokens(rendered)


async def test_a_prompt_too_long_is_refused_at_the_door(vllm_service: Service) -> None:
    model = await vllm_service.services.registry.find("demo")
    assert model.max_model_len is not None
    answer = await vllm_service.client.post(
        "/results/", json={"model": "demo", "content": "x = 1\n" * model.max_model_len}
    )
    assert answer.status_code == 422
    assert str(model.max_model_len) in answer.json()["detail"]


async def test_a_thousand_at_once_equal_direct_calls(
    vllm_service: Service, vllm_triton: EmbeddedTriton
) -> None:
    prompts = [f"import m{number}\n\n\ndef f{number}(x):\n    " for number in range(1000)]
    bodies = [{"model": "demo", "content": text, "parameters": GREEDY} for text in prompts]
    sent = (await vllm_service.client.post("/results/", json=bodies)).json()
    results = await asyncio.gather(
        *(_wait(vllm_service.client, item["id"], seconds=300) for item in sent)
    )
    assert {item["state"] for item in results} == {"completed"}
    assert len({item["id"] for item in results}) == 1000
    assert {item["attempt"] for item in results} == {1}

    # Every result is compared with the same prompt alone on the engine.
    flips = 0
    async with vllm_triton.client() as triton:
        for prompt, result in list(zip(prompts, results, strict=True))[::10]:
            text, logprobs = await _alone(triton, prompt)
            if result["result"] != text:
                assert _is_near_tie(text, result["result"], logprobs), (text, result["result"])
                flips += 1
    assert flips <= 5, "near-ties are rare; so many flips are something else"


async def test_cancelling_frees_the_engine(
    vllm_service: Service, vllm_triton: EmbeddedTriton
) -> None:
    body = {"model": "demo", "content": "def ", "parameters": GREEDY | {"max_tokens": 900}}
    sent = (await vllm_service.client.post("/results/", json=[body] * 8)).json()
    await _until_running(vllm_triton, at_least=1)
    answers = await asyncio.gather(
        *(vllm_service.client.post(f"/results/{item['id']}/cancel") for item in sent)
    )
    for answer in answers:
        result = answer.json()
        assert answer.status_code == 200, result
        assert result["error"]["code"] == "cancelled"
        assert result["finish_reason"] == "cancelled"
    await _until_running(vllm_triton, at_most=0)


async def _wait(client: httpx.AsyncClient, identifier: str, seconds: float) -> dict[str, Any]:
    async with asyncio.timeout(seconds):
        while True:
            answer = await client.get(f"/results/{identifier}", params={"wait": 60})
            result: dict[str, Any] = answer.json()
            if result["state"] != "pending":
                return result


async def _alone(triton: TritonClient, prompt: str) -> tuple[str, list[dict[str, Any]]]:
    """The greedy text of one prompt alone, and its two most likely tokens at each place."""
    pieces: list[str] = []
    logprobs: list[dict[str, Any]] = []
    stream = triton.generate("demo", prompt, GREEDY | {"logprobs": 2})
    async with contextlib.aclosing(stream):
        async for delta in stream:
            pieces.append(delta.text)
            logprobs += json.loads(delta.logprobs) if delta.logprobs else []
    return "".join(pieces), logprobs


def _is_near_tie(text: str, other: str, logprobs: list[dict[str, Any]]) -> bool:
    """Return True if the texts part at a token whose equally probable runner-up is the other text's."""
    said = ""
    for place in logprobs:
        first, second = sorted(place.values(), key=lambda entry: entry["rank"])[:2]
        if not other.startswith(said + first["decoded_token"]):
            gap = first["logprob"] - second["logprob"]
            return bool(
                gap < NEAR_TIE
                and text.startswith(said)
                and other.startswith(said + second["decoded_token"])
            )
        said += first["decoded_token"]
    return False


async def _until_running(
    triton: EmbeddedTriton, *, at_least: int | None = None, at_most: int | None = None
) -> None:
    """Wait for the engine's own count of running requests."""
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            metrics = (await client.get(f"http://{triton.address('metrics')}/metrics")).text
            running = sum(
                float(line.rsplit(" ", 1)[1])
                for line in metrics.splitlines()
                if line.startswith("vllm:num_requests_running")
            )
            if (at_least is None or running >= at_least) and (
                at_most is None or running <= at_most
            ):
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("on_disconnect", ["cancel", "continue"])
async def test_a_client_that_leaves_frees_the_engine(
    vllm_settings: Settings, vllm_triton: EmbeddedTriton, on_disconnect: str
) -> None:
    """A stream dropped by its client frees the engine, or loses nothing: as the client chose."""
    body = {"model": "demo", "content": "def ", "parameters": GREEDY | {"max_tokens": 900}}
    headers = {"Accept": "text/event-stream", "X-On-Disconnect": on_disconnect}
    async with serve(vllm_settings, with_worker=True) as service:
        async with service.client.stream("POST", "/results/", json=body, headers=headers) as stream:
            path = stream.headers["location"]
            async for line in stream.aiter_lines():
                if line.startswith("event: delta"):
                    break
        result = await _wait(service.client, path.removeprefix("/results/"), seconds=60)
        await _until_running(vllm_triton, at_most=0)
    if on_disconnect == "cancel":
        assert result["error"]["code"] == "cancelled"
        assert 0 < result["usage"]["completion_tokens"] < 900
    else:
        assert result["state"] == "completed"
        assert result["usage"]["completion_tokens"] == 900
