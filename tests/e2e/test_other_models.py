"""`MODEL=`: repository entries for other architectures, served by real vLLM."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.provisioning.sizing.cache import CacheShape
from app.provisioning.sizing.config_file import read_config
from app.provisioning.sizing.facts import GIB
from tests.conftest import Service, make_settings, run_service
from tests.e2e.cache_reports import BLOCK_TOKENS, CacheReport, last_report
from tests.e2e.small_models import SmallModels
from tests.postgres import PostgresServer

pytestmark = pytest.mark.timeout(600)

LENGTHS = {"bloom": 65_536, "qwen-int8": 256}


@pytest.mark.parametrize("name", LENGTHS)
async def test_serves(
    name: str,
    entries: dict[str, Path],
    small_models: SmallModels,
    postgres_server: PostgresServer,
    database_name: str,
) -> None:
    await small_models.add(name, entries[name])  # which generates a token
    report = last_report(small_models.log_file)
    repository = small_models.repository
    settings = make_settings(
        postgres_server, database_name, small_models, model_repository=repository
    )
    async with run_service(settings, with_worker=True) as service:
        await check_answers(service, name)
        if name == "qwen-int8":  # the one with a chat template, and with defaults
            await check_chat(service, name)
            await check_defaults(service, name)
    await small_models.remove(name)
    assert report.context == LENGTHS[name]
    assert report.requests >= 1
    check_cache(report, entries[name] / "1" / "weights", sequences=1 if name == "bloom" else 32)


async def check_answers(service: Service, name: str) -> None:
    results = await asyncio.gather(
        *(send(service, {"model": name, "content": f"prompt {number}"}) for number in range(4))
    )
    # One token a byte: the count at the door is the engine's.
    assert {one["usage"]["prompt_tokens"] for one in results} == {len("prompt 0")}
    too_long = {"model": name, "content": "x" * (LENGTHS[name] + 1)}
    refused = await service.client.post("/results/", json=too_long)
    assert refused.status_code == 422


async def check_chat(service: Service, name: str) -> None:
    await send(service, {"model": name, "messages": [{"role": "user", "content": "hello"}]})


async def send(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    body |= {"parameters": {"max_tokens": 8}}
    answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
    result: dict[str, Any] = answer.json()
    assert result["state"] == "completed", result
    assert 0 < result["usage"]["completion_tokens"] <= 8
    return result


async def check_defaults(service: Service, name: str) -> None:
    """A request that leaves `top_k` open has the model's, one that sets it its own."""
    shown = (await service.client.get(f"/models/{name}")).json()
    assert shown["default_parameters"] == {"top_k": 1}

    async def text(**parameters: float) -> str:
        sampling = {"max_tokens": 16, "ignore_eos": True} | parameters
        body = {"model": name, "content": "x", "parameters": sampling}
        answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
        return str(answer.json()["result"])

    greedy = await text(temperature=0)
    assert await text() == await text(temperature=2) == greedy
    assert await text(top_k=0, temperature=2) != greedy


def check_cache(report: CacheReport, weights: Path, sequences: int) -> None:
    """The engine's use of its memory is as the resource calculator predicts."""
    shape = CacheShape(read_config(weights), 1, 2, in_flight=4096, block_tokens=BLOCK_TOKENS)
    # As our backend gives it to a CPU engine (engine_host.py): 16 MiB are more for all but BLOOM.
    block_bytes = shape.token_bytes * BLOCK_TOKENS
    memory = max(16 << 20, sequences * shape.request_bytes(report.context) + block_bytes)
    assert report.gib == round(memory / GIB, 2)
    assert shape.tokens(memory, report.context) == report.tokens
    assert round(shape.requests(memory, report.context), 2) == report.requests
