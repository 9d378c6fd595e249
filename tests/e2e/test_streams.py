"""Streams on real vLLM: no text of a lost attempt is joined to that of the next."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import Stack, open_stack, revive, until
from tests.chaos.stream_client import StreamReader, any_of, random_cuts
from tests.postgres import PostgresServer

pytestmark = pytest.mark.timeout(300)

RESULTS = 4
CUTS = 20


@pytest.fixture
async def vllm_stack(
    postgres_server: PostgresServer,
    database_name: str,
    vllm_triton: EmbeddedTriton,
    tmp_path: Path,
) -> AsyncIterator[Stack]:
    """Processes of the service in front of the vLLM engine."""
    async with open_stack(tmp_path, postgres_server, database_name, vllm_triton) as stack:
        yield stack


async def send(stack: Stack, prompt: str, sampling: dict[str, Any], *, continues: bool) -> str:
    body = {"model": "demo", "content": prompt, "parameters": sampling}
    answer = await stack.client.post("/results/", body | {"continue_lost_attempts": continues})
    assert answer.status == 202, answer
    return str(answer.json["id"])


async def test_disconnects_and_deaths_splice_no_sampled_text(vllm_stack: Stack) -> None:
    """Sampled without a seed, each attempt generates another text: a splice would show.

    Every other result is continued after its worker's death; its readers keep what was stored.
    """
    stack = vllm_stack
    other_api = await stack.start_api("other")
    worker = await stack.start_worker("alice")
    sampling = {"max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
    ids = await asyncio.gather(
        *(send(stack, f"def f{n}(x):\n", sampling, continues=n % 2 == 0) for n in range(RESULTS))
    )
    readers = [StreamReader(one) for one in ids for _ in range(2)]
    ports = list(stack.ports.values())
    reading = [
        asyncio.create_task(
            reader.read_to_the_end(any_of(ports, number), random_cuts(number, CUTS, 900))
        )
        for number, reader in enumerate(readers)
    ]

    async def have_read(attempt: int, deltas: int) -> bool:
        return all(r.attempt == attempt and r.deltas >= deltas for r in readers)

    await until(lambda: have_read(1, 10), 60, "all read")
    worker.send_signal(signal.SIGKILL)
    first = {reader.result_id: reader.text for reader in readers}
    for reader in readers:
        reader.deltas = 0
    await revive(worker)
    await until(lambda: have_read(2, 5), 60, "all read the second attempt")
    other_api.send_signal(signal.SIGKILL)
    await revive(other_api)

    await asyncio.wait_for(asyncio.gather(*reading), 120)
    for reader in readers:
        reader.check_end()
        assert reader.result is not None
        assert reader.result["state"] == "completed"
        assert reader.attempts == [1, 2]
        assert reader.connections > CUTS
        before = first[reader.result_id]
        if ids.index(reader.result_id) % 2 == 0:
            assert reader.result["continued"] == 1
            assert reader.text[0] == before[0]
        else:
            assert reader.result["continued"] == 0
            assert not reader.text.startswith(before), "the attempts are alike"
    await check_history(stack)
    check_logs(stack)
