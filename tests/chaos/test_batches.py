"""kill -9 of the processes that feed a batch: each line is sent once, and none is forgotten."""

import json
import signal
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.chaos.history import check_logs
from tests.chaos.stack import Stack, kept_running, until

COUNT = 1000


@pytest.mark.timeout(300)
async def test_workers_that_die_in_mid_batch(stack: Stack) -> None:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "scripted", "prompt": f"{{{{chunks=3 delay_ms=20}}}} {number}"},
        }
        for number in range(COUNT)
    ]
    workers = [
        await stack.start_worker(name, LLM_BATCH_IN_FLIGHT="100") for name in ("alice", "bob")
    ]
    url = f"http://127.0.0.1:{stack.ports['api']}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        file = await client.files.create(
            file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch"
        )
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        async def has_done(count: int) -> bool:
            found = await client.batches.retrieve(batch.id)
            assert found.request_counts
            return found.request_counts.completed >= count or found.status == "completed"

        async with kept_running(workers[0]), kept_running(workers[1]):
            for number in range(6):
                await until(partial(has_done, 1 + number * COUNT // 8), 120)
                feeding = await stack.fetch("SELECT feeder_id FROM batches")
                assert len(feeding) == 1
                workers[number % 2].send_signal(signal.SIGKILL)
            await until(lambda: _is_ended(client, batch.id), 90)
        ended = await client.batches.retrieve(batch.id)
        assert ended.status == "completed", ended
        output = await _read(client, ended.output_file_id)
    # A line is done once: by a result of its own, that is the only one.
    assert ended.error_file_id is None
    assert sorted(int(one["custom_id"]) for one in output) == list(range(COUNT))
    ids = {one["response"]["request_id"] for one in output}
    assert len(ids) == COUNT
    assert await stack.count("true") == COUNT
    check_logs(stack)


async def _is_ended(client: AsyncOpenAI, batch_id: str) -> bool:
    found = await client.batches.retrieve(batch_id)
    return found.status in ("completed", "failed", "expired", "cancelled")


async def _read(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
