"""A data set mapped by the Python client through a network that loses and replaces answers, while client, API
and worker are killed: each row has one answer, and none is reported as failed.

`FUZZ=20` maps 100,000 rows and kills each of the three five times.
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
from tests.faulty_proxy import FaultyProxy
from tests.integration.support import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]

FACTOR = int(os.environ.get("FUZZ", "1"))
ROWS = 2_000 if FACTOR == 1 else 5_000 * FACTOR
VICTIMS = ["client", "api", "worker"] * (2 if FACTOR == 1 else 5)
SHARE = 0.05  # of the answers
# Milliseconds of each of two words: time for the kills.
DELAY = 400 if FACTOR == 1 else 30
# Rows of a list: some hundred answers, of which one in twenty is replaced.
LIST = 50 if FACTOR == 1 else 250
PROGRAM = f"""
import sys
from llm_api_client import Client
from llm_api_client.jobs import batches
batches.MAX_ROWS = {LIST}
rows = ({{"id": f"k{{i}}", "topic": f"topic-{{i}}"}} for i in range({ROWS}))
with Client(sys.argv[1]) as client:
    prompt = "{{{{{{{{delay_ms={DELAY} text={{topic}} end}}}}}}}}"
    job = client.map(rows, prompt, model="scripted", key="id", out=sys.argv[2])
    failed = [row for row in job if row.error is not None]
    print(job.info().counts.completed if not failed else failed[:3])
"""


class Mapping:
    """The client's process, started again after each of its kills."""

    def __init__(self, url: str, out: Path) -> None:
        self._url = url
        self.out = out
        self.processes = 0
        self.early_ends: list[str] = []  # what it wrote where it was fast
        self._process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.processes += 1
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, self._url, self.out, stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "client")},
        )  # fmt: skip

    async def kill(self) -> None:
        """Kill it, with a torn line behind the others; the next process goes on."""
        if self._process.returncode is not None:  # it was fast: it sends and reads all again
            self.early_ends.append(await self.end())
            await self.start()
        self._process.kill()
        await self._process.wait()
        with self.out.open("ab") as file:
            file.write(b'{"key":"torn","text":"","vector":[0.1,')
        await self.start()

    async def end(self) -> str:
        output, _ = await self._process.communicate()
        return output.decode().strip()

    async def until_written(self, lines: int) -> None:
        async def are_written() -> bool:
            return self.out.exists() and self.out.read_bytes().count(b"\n") >= lines

        await until(are_written, 600)


async def test_each_row_once_whatever_is_killed(stack: Stack, tmp_path: Path) -> None:
    worker = await stack.start_worker("alice")
    proxy = FaultyProxy(f"http://127.0.0.1:{stack.ports['api']}", share=SHARE, seed=43)
    began = asyncio.get_running_loop().time()
    async with proxy.run():
        mapping = Mapping(proxy.url, tmp_path / "answers.jsonl")
        await mapping.start()
        for number, victim in enumerate(VICTIMS, 1):
            await mapping.until_written(number * ROWS // (len(VICTIMS) + 2))
            if victim == "client":
                await mapping.kill()
            else:
                part = stack.api if victim == "api" else worker
                part.send_signal(signal.SIGKILL)
                await revive(part)
        output = await mapping.end()
    seconds = asyncio.get_running_loop().time() - began
    faults = {fault.name: count for fault, count in proxy.faults.items()}
    report = f"{ROWS} rows in {seconds:.0f} s, {proxy.requests} requests, {faults}, {Counter(VICTIMS)} killed"
    print(report, f"{mapping.processes} client processes")  # noqa: T201 - pytest -s shows it
    assert [*mapping.early_ends, output] == [str(ROWS)] * (len(mapping.early_ends) + 1), report
    answers = [json.loads(line) for line in mapping.out.read_bytes().splitlines()]
    assert Counter(line["key"] for line in answers) == Counter(f"k{i}" for i in range(ROWS))
    assert all(line["text"] == f"topic-{line['key'][1:]} end" for line in answers)
    assert (tmp_path / "answers.jsonl.failed.jsonl").read_bytes() == b""
    assert await stack.count("state = 'completed'") == ROWS
    assert await stack.count("state <> 'completed'") == 0
    assert sum(proxy.faults.values()) >= proxy.requests * SHARE / 3 >= 1, report
