"""LoRA adapters on real vLLM: each request has the output of its own adapter."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.e2e.small_models import ADAPTERS, PROMPT, SmallModels
from tests.triton_streams import ModelError, ask, collect

pytestmark = pytest.mark.timeout(300)

SAMPLING = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture
def expected(computed: dict[str, Any]) -> dict[str, list[int]]:
    """The tokens that transformers generates, by the adapter's name."""
    found: dict[str, list[int]] = computed["adapters"]
    return found


@pytest.fixture
async def service(tools_settings: Settings) -> AsyncIterator[Service]:
    async with run_service(tools_settings, with_worker=True) as running:
        yield running


def name_of(adapter: str) -> str:
    return f"tools:{adapter}" if adapter else "tools"


async def test_each_has_the_output_of_merged_weights(
    service: Service, expected: dict[str, list[int]]
) -> None:
    """The requests run side by side, with several adapters in a step of the engine."""
    bodies = [
        {"model": name_of(adapter), "content": PROMPT, "parameters": SAMPLING | {"logprobs": 0}}
        for adapter in [*expected] * 2
    ]
    answers = await asyncio.gather(
        *(
            service.client.post("/results/", json=one, headers={"Prefer": "wait=60"})
            for one in bodies
        )
    )
    for body, answer in zip(bodies, answers, strict=True):
        result = answer.json()
        assert result["state"] == "completed", result
        adapter = str(body["model"]).removeprefix("tools").removeprefix(":")
        assert ids_of(result["logprobs"]) == expected[adapter]
        assert result["parameters"].get("lora_name", "") == adapter


def ids_of(logprobs: list[Any]) -> list[int]:
    return [int(next(iter(one))) for one in logprobs]


async def test_a_lost_text_continues_with_its_adapter(
    tools_triton: SmallModels, service: Service, expected: dict[str, list[int]]
) -> None:
    for adapter in ADAPTERS:
        sampling = SAMPLING | {"lora_name": adapter}
        whole = await collect(
            tools_triton, ask("tools", PROMPT, sampling, stream=True, return_token_ids=True)
        )
        ids = [one for response in whole for one in response["token_ids"]]
        assert ids == expected[adapter]
        first = ask(
            "tools", PROMPT, sampling | {"max_tokens": 5}, stream=True, return_token_ids=True
        )
        begun = await collect(tools_triton, first)
        text = "".join(response["text_output"][0] for response in begun)
        rest = await collect(
            tools_triton,
            ask(
                *("tools", PROMPT, sampling),
                stream=True,
                return_token_ids=True,
                resume_token_ids=ids[:5],
                resume_text=text,
            ),
        )
        assert [one for response in rest for one in response["token_ids"]] == ids[5:]


async def test_the_engine_refuses_an_unknown_adapter_by_name(tools_triton: SmallModels) -> None:
    with pytest.raises(ModelError, match="unknown lora_name 'cat'; known: dog, sheep"):
        await collect(
            tools_triton, ask("tools", PROMPT, SAMPLING | {"lora_name": "cat"}, stream=True)
        )


async def test_the_lists_have_them(service: Service) -> None:
    models = (await service.client.get("/models/")).json()
    adapters = {one["name"]: one["adapters"] for one in models}
    assert adapters["tools"] == list(ADAPTERS)
