"""Log probabilities of prompts: those of vLLM's own server, to the last digit, on real vLLM."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, connect
from tests.integration.support import serve, until
from tests.triton_streams import ask, collect

pytestmark = pytest.mark.timeout(300)

# Members of a choice that both servers have.
COMPARED = ("index", "text", "logprobs", "finish_reason", "prompt_logprobs")
PROMPT = "def add(a, b):\n    return "
# One prompt at a time: the last digits depend on what else the engine computes in the same step.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1},
    {"prompt": PROMPT, "echo": True, "logprobs": 5, "max_tokens": 0},
    {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 8},
    {"prompt": "é🙂 \n", "echo": True, "logprobs": 2, "max_tokens": 4},
    {"prompt": "x", "echo": True, "max_tokens": 0},
    {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 3},
    {"prompt": PROMPT, "echo": True, "logprobs": 2, "prompt_logprobs": 4, "max_tokens": 2},
    # Ids that the tokenizer makes of no text: without its first token, and parts of characters.
    {"prompt": [307, 912, 8, 65], "echo": True, "logprobs": 2, "max_tokens": 1},
    {"prompt": [[0, 307, 912]], "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": [128, 103, 121], "prompt_logprobs": 1, "max_tokens": 4},
    {"prompt": "import os\n" * 100, "echo": True, "logprobs": 1, "max_tokens": 1},
]


@pytest.fixture
async def port(vllm_settings: Settings) -> AsyncIterator[Service]:
    """The service behind a real port, in front of the vLLM engine."""
    async with serve(vllm_settings, with_worker=True) as service:
        yield service


async def both(service: Service, url: str, path: str, body: Any) -> tuple[Any, Any]:
    """Our response to a request, and that of vLLM's server."""
    ours = await service.client.post(path, json=body)
    assert ours.status_code == 200, ours.text
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        theirs = await client.post(path, json=body)
    assert theirs.status_code == 200, theirs.text
    return ours.json(), theirs.json()


async def test_completions_are_those_of_vllms_server(port: Service, vllm_url: str) -> None:
    for members in REQUESTS:
        body = {"model": "demo", "temperature": 0} | members
        ours, theirs = await both(port, vllm_url, "/v1/completions", body)
        for choice, expected in zip(ours["choices"], theirs["choices"], strict=True):
            for name in COMPARED:
                assert choice.get(name) == expected[name], (members, name)
        assert ours["usage"].items() <= theirs["usage"].items(), members


async def test_a_chat_is_scored_as_its_rendered_prompt(port: Service, vllm_url: str) -> None:
    """vLLM's chats do not begin with the token that the tokenizer adds (docs/openai.md); its completions do."""
    messages = [{"role": "user", "content": "Add two numbers."}]
    body = {"model": "demo", "max_tokens": 3, "temperature": 0, "prompt_logprobs": 3}
    ours = await port.client.post("/v1/chat/completions", json=body | {"messages": messages})
    async with httpx.AsyncClient(base_url=vllm_url, timeout=120) as client:
        rendered = body | {"prompt": "# Add two numbers.\n\n"}
        theirs = (await client.post("/v1/completions", json=rendered)).json()
    assert ours.json()["prompt_logprobs"] == theirs["choices"][0]["prompt_logprobs"]
    assert ours.json()["choices"][0]["message"]["content"] == theirs["choices"][0]["text"]


async def test_a_call_and_a_session_have_the_same(
    port: Service, vllm_triton: EmbeddedTriton
) -> None:
    """A generation that is traced has a call of its own."""
    parameters = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}
    body = {"model": "demo", "content": PROMPT, "parameters": parameters}
    answer = await port.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
    flags: dict[str, Any] = {"return_prompt_logprobs": True, "exclude_input_in_output": True}
    first, *rest = await collect(vllm_triton, ask("demo", PROMPT, parameters, stream=True, **flags))
    assert json.loads(first["prompt_logprobs"][0]) == answer.json()["prompt_logprobs"]
    assert not any("prompt_logprobs" in response for response in rest)
    (whole,) = await collect(vllm_triton, ask("demo", PROMPT, parameters, stream=False, **flags))
    assert whole["prompt_logprobs"] == first["prompt_logprobs"]


async def test_token_ids_are_stored_until_they_are_erased(
    port: Service, vllm_settings: Settings
) -> None:
    body = {"model": "demo", "prompt": [307, 912], "max_tokens": 1, "store": False}
    answer = await port.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 2
    kept = await port.client.post("/v1/completions", json=body | {"store": True})
    result_id = kept.headers["X-Result-Id"]
    result = (await port.client.get(f"/results/{result_id}")).json()
    assert result["parameters"]["prompt_token_ids"] == [307, 912]
    retried = (await port.client.post(f"/results/{result_id}/retry")).json()
    again = (await port.client.get(f"/results/{retried['id']}", params={"wait": 30})).json()
    assert again["usage"] == result["usage"]
    connection = await connect(vllm_settings)
    erased = "SELECT parameters ? 'prompt_token_ids' FROM results WHERE erased_at IS NOT NULL"
    assert await until(lambda: connection.fetch(erased)) == [(False,)]
    await connection.close()


async def test_token_ids_that_the_model_lacks_are_refused(port: Service) -> None:
    for ids in ([999_999], [5] * 2_000):
        body = {"model": "demo", "prompt": ids, "max_tokens": 1}
        answer = await port.client.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
