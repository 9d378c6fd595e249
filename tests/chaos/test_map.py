"""A data set mapped by the Python client while client, API and worker are killed, twice each.

MAP_ROWS=100000 maps as many rows.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.stack import Stack, revive
from tests.conftest import ROOT
from tests.integration.support import until

pytestmark = pytest.mark.timeout(3000)

ROWS = int(os.environ.get("MAP_ROWS", "4000"))
# Milliseconds of each of two words: time for six kills.
DELAY = 400 if ROWS < 10_000 else 30
PROGRAM = f"""
import sys
from llm_api_client import Client
rows = ({{"id": f"k{{i}}", "topic": f"topic-{{i}}"}} for i in range({ROWS}))
with Client(sys.argv[1]) as client:
    prompt = "{{{{{{{{delay_ms={DELAY} text={{topic}} end}}}}}}}}"
    print(client.map(rows, prompt, model="scripted", key="id", out=sys.argv[2]).run().counts.completed)
"""


async def start_client(url: str, out: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, url, out, stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT / "client")},
    )  # fmt: skip


async def until_written(out: Path, lines: int) -> None:
    async def are_written() -> bool:
        return out.exists() and out.read_bytes().count(b"\n") >= lines

    await until(are_written, 600)


async def test_each_row_once_whatever_is_killed(stack: Stack, tmp_path: Path) -> None:
    url, out = f"http://127.0.0.1:{stack.environment['LLM_PORT']}", tmp_path / "answers.jsonl"
    worker = await stack.start_worker("alice")
    client = await start_client(url, out)
    victims = ["client", "api", "worker"] * 2
    for number, victim in enumerate(victims, 1):
        await until_written(out, number * ROWS // (len(victims) + 2))
        if victim == "client":
            if client.returncode is not None:  # it was fast: it sends and reads all again
                client = await start_client(url, out)
            client.kill()
            await client.wait()
            client = await start_client(url, out)
        else:
            part = stack.api if victim == "api" else worker
            part.send_signal(signal.SIGKILL)
            await revive(part)
    output, _ = await client.communicate()
    assert output.decode().strip() == str(ROWS)
    answers = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert Counter(line["key"] for line in answers) == Counter(f"k{i}" for i in range(ROWS))
    assert all(line["text"] == f"topic-{line['key'][1:]} end" for line in answers)
    assert await stack.count("state = 'completed'") == ROWS
    assert await stack.count("state <> 'completed'") == 0
