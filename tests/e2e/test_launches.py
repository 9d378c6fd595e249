"""A launched server with a real vLLM: the options of its request reach the engine."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.core.settings import Settings
from app.provisioning.local import processes_of
from tests.conftest import ROOT, TRITON_VENV, Service, run_service
from tests.e2e.small_models import ADAPTERS, PROMPT
from tests.integration.launching import launch, stop, until_state, with_profiles
from tests.integration.support import until

pytestmark = pytest.mark.timeout(400)

START_SECONDS = 240.0
PROFILES = f"""
[profiles.here]
provider = "local"
home = "HOME"
idle_minutes = 0
model_roots = ["{ROOT / "models" / "demo"}"]
runtime = "embedded"
venv = "{TRITON_VENV}"
triton = "{ROOT / "triton"}"
[profiles.tiny]
provider = "local"
home = "HOME"
idle_minutes = 0
model_roots = ["BASE"]
runtime = "embedded"
venv = "{TRITON_VENV}"
triton = "{ROOT / "triton"}"
"""
ENGINE = {"max_model_len": 256, "dtype": "float32", "gpu_memory_utilization": 0.4}


@pytest.fixture
async def launching(
    settings: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    text = PROFILES.replace("BASE", str(tmp_path_factory.getbasetemp()))
    changed = with_profiles(settings, tmp_path, text)
    async with run_service(changed, with_worker=True) as service:
        yield service
    for folder in (tmp_path / "home" / "launches").glob("*"):
        for pid in processes_of(UUID(folder.name)):
            os.kill(pid, signal.SIGKILL)


async def send(
    service: Service, model: str, content: str = "def ", **parameters: Any
) -> dict[str, Any]:
    """The result of one prompt."""
    body = {"model": model, "content": content, "parameters": {"max_tokens": 4} | parameters}
    answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=30"})
    assert answer.status_code < 500, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def test_options_and_adapters_reach_the_engine(
    launching: Service, made: Path, computed: dict[str, Any]
) -> None:
    weights = made / "models" / "tools"
    accepted = await launch(
        launching, profile="tiny", model=str(weights), served_name="herd",
        engine=ENGINE | {"max_logprobs": 2, "enable_prefix_caching": False, "max_num_seqs": 3},
        adapters={name: str(made / "adapters" / name) for name in ADAPTERS},
    )  # fmt: skip
    await until_state(launching, accepted["id"], "healthy", seconds=START_SECONDS)
    await check_options(launching)
    await check_adapters(launching, computed["adapters"])
    await stop(launching, accepted["id"])
    assert await names(launching) in (["herd"], [])


async def check_options(launching: Service) -> None:
    async def is_known() -> bool:
        return (await launching.client.get("/models/herd")).status_code == 200

    await until(is_known)
    good = await send(launching, "herd", logprobs=2)
    assert good["state"] == "completed", good
    refused = await send(launching, "herd", logprobs=3)
    assert refused["error"]["code"] == "invalid_request"
    assert "logprobs" in refused["error"]["message"], refused


async def names(launching: Service) -> list[str]:
    found = (await launching.client.get("/v1/models")).json()["data"]
    return [one["id"] for one in found if one["id"].startswith("herd")]


async def check_adapters(launching: Service, expected: dict[str, list[int]]) -> None:
    """Each is a model of its own, with the output of merged weights."""

    async def is_listed() -> bool:
        return await names(launching) == ["herd", "herd:dog", "herd:sheep"]

    await until(is_listed)
    assert (await launching.client.get("/models/herd")).json()["adapters"] == ["dog", "sheep"]
    for adapter, tokens in expected.items():
        name = f"herd:{adapter}" if adapter else "herd"
        sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 12, "logprobs": 0}
        result = await send(launching, name, PROMPT, **sampling)
        assert result["state"] == "completed", result
        assert [int(next(iter(one))) for one in result["logprobs"]] == tokens


async def test_an_option_that_the_engine_refuses_is_the_reason(launching: Service) -> None:
    """Names and types are checked before; the engine checks what fits together."""
    model = str(ROOT / "models" / "demo" / "1")
    engine = ENGINE | {"max_num_batched_tokens": 1, "enable_chunked_prefill": False}
    accepted = await launch(launching, model=model, served_name="small", engine=engine)
    ended = await until_state(launching, accepted["id"], "failed", seconds=START_SECONDS)
    assert "max_num_batched_tokens" in ended["reason"]
