"""Whole lives of BentoML's tasks: submitted, run, kept in its SQLite, fetched.

BentoML stores what it was asked and what came of it, as ours does, but without syncing it to disk;
its guide says that this is for development. Its task calls no model: what is measured is BentoML.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson

from app.cli.up import processes
from bench.load import HOST, Load, get, post
from bench.servers import House, Server, answers
from bench.streams import HttpClient, http_clients

_SERVE = ("serve", "bento_service:Instant", "--quiet")
_PAUSE = 0.005  # seconds, before a task that has not ended is asked for again
_MOST_POLLS = 10_000


@contextlib.asynccontextmanager
async def bento_server(house: House, binaries: Path) -> AsyncIterator[Server]:
    """`bentoml serve`, once it is ready; it logs nothing of a request."""
    directory = house.directory / "bentoml"
    directory.mkdir()
    shutil.copy(Path(__file__).with_name("bento_service.py"), directory)
    port = processes.free_port()
    process = processes.spawn(
        [str(binaries / "bentoml"), *_SERVE, "--host", HOST, "--port", str(port)],
        log_file=house.directory / "logs" / "bentoml.log",
        env={**os.environ, "BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(directory)},
        cwd=directory,
    )
    try:
        url = f"http://{HOST}:{port}/readyz"
        await house.until_ready(process.pid, lambda: answers(url, ""))
        yield Server(process.pid, port)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def run_tasks(server: Server, prompt: str, callers: int, seconds: float) -> Load:
    """Callers in closed loops; `rate` is of the time asked for, as of other loads."""
    load = Load()
    request = post("/complete/submit", orjson.dumps({"prompt": prompt}))
    ends = time.perf_counter() + seconds

    async def call(client: HttpClient) -> None:
        while (began := time.perf_counter()) < ends:
            await _life(client, request)
            ended = time.perf_counter()
            load.latencies.append(ended - began)
            load.rate += ended < ends

    async with http_clients(server.port, callers) as clients:
        await asyncio.gather(*map(call, clients))
    load.count = len(load.latencies)
    load.rate /= seconds
    return load


async def _life(client: HttpClient, request: bytes) -> None:
    answer = await client.ask(request)
    if answer.status != 200:
        raise RuntimeError(f"unexpected answer: {answer.head!r} {answer.body[:400]!r}")
    fetch = get(f"/complete/get?task_id={orjson.loads(answer.body)['task_id']}")
    for _ in range(_MOST_POLLS):
        if (await client.ask(fetch)).status == 200:
            return
        await asyncio.sleep(_PAUSE)
    raise RuntimeError("a task did not end")
