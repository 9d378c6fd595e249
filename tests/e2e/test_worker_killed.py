"""A worker that is killed frees the engine: its session ends with its connection."""

from pathlib import Path

import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import run_service
from tests.e2e.engine_metrics import read_metrics
from tests.integration.launching import Worker
from tests.integration.support import until

pytestmark = pytest.mark.timeout(300)

COUNT = 16


async def test_the_generations_of_a_killed_worker_leave_the_engine(
    vllm_settings: Settings, vllm_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    async def running() -> int:
        metrics = await read_metrics(vllm_triton)
        return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]

    async def is_full() -> bool:
        return await running() == COUNT

    async def is_idle() -> bool:
        return await running() == 0

    parameters = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}
    body = {"model": "demo", "content": "def ", "parameters": parameters}
    async with run_service(vllm_settings, with_worker=False) as service:
        worker = Worker(vllm_settings, tmp_path)
        await worker.start()
        answer = await service.client.post("/results/", json=[body] * COUNT)
        assert answer.status_code == 202, answer.text
        await until(is_full)
        await worker.kill()
        await until(is_idle)
        left = (await service.client.get("/results/", params={"state": "pending"})).json()
        assert len(left) == COUNT, "the results ended by themselves"
