"""Clients of a service that runs in this process."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llm_api_client import Client
from tests.conftest import ROOT, Service
from tests.integration.support import until

T = TypeVar("T")


def url_of(service: Service) -> str:
    return str(service.client.base_url).rstrip("/")


async def blocking(service: Service, work: Callable[[Client], T], key: str | None = None) -> T:
    """Run work with a blocking client in a thread: the service needs this event loop."""

    def run() -> T:
        with Client(url_of(service), key) as client:
            return work(client)

    return await asyncio.to_thread(run)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def run_killed(
    service: Service,
    program: str,
    number: int,
    out: Path,
    *,
    at: Sequence[int],
) -> list[dict[str, Any]]:
    """The lines of a program that maps `number` rows, `k0` and on, into a file.

    It is killed once the file has as many lines as each of `at`, with a torn line behind them, and at last
    runs to its end: each row has one line.
    """
    environment = os.environ | {
        "LLM_API_URL": url_of(service),
        "PYTHONPATH": str(ROOT / "client"),
    }

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(number), out, env=environment,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip

    for some in at:
        process = await start()

        async def has_written(least: int = some) -> bool:
            return out.exists() and out.read_bytes().count(b"\n") >= least

        await until(has_written)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        with out.open("ab") as file:
            file.write(b'{"key":"torn","text":"","vector":[0.1,')
    process = await start()
    output, _ = await process.communicate()
    assert output.decode().strip() == str(number)
    written = lines(out)
    assert Counter(line["key"] for line in written) == Counter(f"k{i}" for i in range(number))
    return written
