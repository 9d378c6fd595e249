"""The goal `embeddings`: vectors of many texts, by OpenAI's route and as native lists."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from app.cli.up.triton import EmbeddedTriton
from bench import progress
from bench.cpu import exact_seconds, tree_seconds
from bench.report import Options, Report
from bench.servers import House

_ROWS = 20_000  # texts of an arm
_AT_ONCE = 500  # texts of a request
_REQUESTS = 4  # of OpenAI's route, side by side
_PER_HOUR = 100_000
_POLL_SECONDS = 0.1
_ROOT = Path(__file__).resolve().parents[1]
_MODEL = "pooling"
_ARMS = ("requests of OpenAI's route", "native lists")


async def run(house: House, options: Options) -> Report:
    """Both arms in turn, on one database and a Triton with a scripted embeddings model."""
    count = min(options.rows, _ROWS)
    parts = ("API us", "worker us", "Postgres us")
    title = f"{count:,} texts, {_AT_ONCE} a request, each stored with its vector"
    report = Report("EMBEDDINGS", title, ["texts/s", *parts])
    taken: list[list[list[float]]] = [[], []]
    environment = await house.environment("bench_embeddings")
    async with (
        _triton(house) as triton,
        house.api(environment | triton.environment, model=_MODEL) as api,
        house.worker(environment | triton.environment) as worker,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{api.port}", timeout=600) as http,
    ):
        pids = {"api": api.pid, "worker": worker.pid, "postgres": house.postgres_pid}
        for turn in range(-1, options.rounds):  # the first one warms up
            for arm, name in enumerate(_ARMS):
                progress.show(name, max(turn, 0), options.rounds)
                texts = _AT_ONCE if turn < 0 else count
                figures = await _measure(http, pids, texts, is_native=arm == 1)
                if turn >= 0:
                    taken[arm].append(figures)
    for name, rounds in zip(_ARMS, taken, strict=True):
        report.rows.append((name, [statistics.median(one) for one in zip(*rounds, strict=True)]))
        hour = statistics.median(figures[0] for figures in rounds) * 3600
        report.check(f"texts in an hour, {name}", hour, ">=", _PER_HOUR)
    return report


@asynccontextmanager
async def _triton(house: House) -> AsyncIterator[EmbeddedTriton]:
    models = {_MODEL: _ROOT / "tests" / "triton_models" / _MODEL}
    directory = house.directory / "pooling"
    server = EmbeddedTriton(_ROOT / ".venv-triton", directory, models, directory / "triton.log")
    directory.mkdir()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def _measure(
    http: httpx.AsyncClient, pids: Mapping[str, int], count: int, *, is_native: bool
) -> list[float]:
    """Texts a second, and CPU microseconds a text of each part."""
    before, began = _spent(pids), time.perf_counter()
    starts = range(0, count, _AT_ONCE)
    if is_native:
        for start in starts:
            items = [
                {"model": _MODEL, "content": one, "embedding": {"dimensions": 384}}
                for one in _texts(start)
            ]
            (await http.post("/results/", json=items)).raise_for_status()
        await _until_ended(http)
    else:
        places = asyncio.Semaphore(_REQUESTS)
        await asyncio.gather(*(_embed(http, start, places) for start in starts))
    seconds, after = time.perf_counter() - began, _spent(pids)
    return [count / seconds, *((after[part] - before[part]) / count * 1e6 for part in pids)]


async def _embed(http: httpx.AsyncClient, start: int, places: asyncio.Semaphore) -> None:
    body = {"model": _MODEL, "input": _texts(start), "encoding_format": "base64", "dimensions": 384}
    async with places:
        answer = (await http.post("/v1/embeddings", json=body)).raise_for_status()
    assert len(answer.json()["data"]) == _AT_ONCE


def _texts(start: int) -> list[str]:
    return [f"a sentence of the data set {number}" for number in range(start, start + _AT_ONCE)]


async def _until_ended(http: httpx.AsyncClient) -> None:
    while True:
        if (await http.get("/results/?state=pending&limit=1")).json() == []:
            return
        await asyncio.sleep(_POLL_SECONDS)


def _spent(pids: Mapping[str, int]) -> dict[str, float]:
    return {
        part: exact_seconds(pid) if part == "postgres" else tree_seconds(pid)
        for part, pid in pids.items()
    }
