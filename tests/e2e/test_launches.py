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
from tests.integration.launching import launch, stop, until_state, with_profiles
from tests.integration.support import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

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
"""
ENGINE = {"max_model_len": 256, "dtype": "float32", "gpu_memory_utilization": 0.4}


@pytest.fixture
async def launching(settings: Settings, tmp_path: Path) -> AsyncIterator[Service]:
    changed = with_profiles(settings, tmp_path, PROFILES)
    async with run_service(changed, with_worker=True) as service:
        yield service
    for folder in (tmp_path / "home" / "launches").glob("*"):
        for pid in processes_of(UUID(folder.name)):
            os.kill(pid, signal.SIGKILL)


async def send(service: Service, model: str, **parameters: Any) -> dict[str, Any]:
    """The result of one prompt."""
    body = {"model": model, "content": "def ", "parameters": {"max_tokens": 4} | parameters}
    answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=30"})
    assert answer.status_code < 500, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def test_options_reach_the_engine(launching: Service) -> None:
    engine = ENGINE | {"max_logprobs": 2, "enable_prefix_caching": False, "max_num_seqs": 3}
    model = str(ROOT / "models" / "demo" / "1")
    accepted = await launch(launching, model=model, served_name="small", engine=engine)
    await until_state(launching, accepted["id"], "healthy", seconds=START_SECONDS)

    async def is_known() -> bool:
        return (await launching.client.get("/models/small")).status_code == 200

    await until(is_known)
    good = await send(launching, "small", logprobs=2)
    assert good["state"] == "completed", good
    refused = await send(launching, "small", logprobs=3)
    assert refused["error"]["code"] == "invalid_request"
    assert "logprobs" in refused["error"]["message"], refused
    await stop(launching, accepted["id"])


async def test_an_option_that_the_engine_refuses_is_the_reason(launching: Service) -> None:
    """Names and types are checked before; the engine checks what fits together."""
    model = str(ROOT / "models" / "demo" / "1")
    engine = ENGINE | {"max_num_batched_tokens": 1, "enable_chunked_prefill": False}
    accepted = await launch(launching, model=model, served_name="small", engine=engine)
    ended = await until_state(launching, accepted["id"], "failed", seconds=START_SECONDS)
    assert "max_num_batched_tokens" in ended["reason"]
