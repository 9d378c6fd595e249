"""P3: CPU per result, against LiteLLM's proxy and BentoML's tasks with nothing to wait for either.

Ours and LiteLLM answer `POST /v1/chat/completions` of a few words, not streamed. Ours stores prompt and result,
runs it on the real Triton's scripted model (API and worker in one process), and its PostgreSQL is
counted. LiteLLM stores nothing; its upstream answers a fixed completion and is not counted. The bare
gRPC client of P2 shows the cost of the call of Triton alone. A task of BentoML is submitted, kept in
its SQLite with what it answers at once, and fetched. Each runs one server, from `.venv-peers`
(`make .venv-peers`).
"""

import asyncio
import contextlib
import os
import secrets
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import yaml

from app.cli.up import processes
from bench import progress
from bench.bento_tasks import bento_server, run_tasks
from bench.cpu import Sample, measure
from bench.load import HOST, connect, post
from bench.p2_life import _bare
from bench.plots import Bar, Bars, Goal
from bench.report import Options, Report, median_ratio
from bench.servers import MODEL, House, Server

_PROMPT = "Write it. {{chunks=1}}"
_CALLERS = (1, 64, 256)
_MANY = 64  # the number that CPU is judged at
_TIMES_IN_ALL = 15
_WARM_UP_SECONDS = 2.0
_START_SECONDS = 120.0
PEERS = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin"
_BODY = orjson.dumps(
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": 16,
        "temperature": 0,
    }
)


async def run(house: House, options: Options) -> Report:
    """Measure the arms in turn, at one number of callers after another."""
    for name in ("litellm", "bentoml"):
        if not (PEERS / name).exists():
            raise RuntimeError(f"{name} is not installed: run `make .venv-peers`")
    report = Report(
        "P3",
        "CPU per result",
        ["requests/s", "server us", "Postgres us", "p50 ms", "p99 ms"],
    )
    environment = await house.environment("bench_p3")
    ours: dict[int, list[Sample]] = {callers: [] for callers in _CALLERS}
    theirs: dict[int, list[Sample]] = {callers: [] for callers in _CALLERS}
    tasks: dict[int, list[Sample]] = {callers: [] for callers in _CALLERS}
    bare: list[float] = []
    progress.show("starting LiteLLM and BentoML")
    async with (
        house.api(environment, with_worker=True) as api,
        house.baselines(environment) as upstream,
        _litellm(house.directory, upstream) as (litellm, key),
        bento_server(house, PEERS) as bento,
    ):
        request = post("/v1/chat/completions", _BODY)
        with_key = post("/v1/chat/completions", _BODY, f"Authorization: Bearer {key}\r\n")
        for turn in range(-1, options.rounds):  # the first one warms up
            seconds = options.seconds if turn >= 0 else _WARM_UP_SECONDS
            for callers in _CALLERS:
                progress.show(f"{callers} callers: ours, LiteLLM, BentoML", turn, options.rounds)
                parts = {"server": api.pid, "postgres": house.postgres_pid}
                found = await _load(api, request, callers, seconds, parts)
                peer = await _load(litellm, with_key, callers, seconds, {"server": litellm.pid})
                work = run_tasks(bento, _PROMPT, callers, seconds)
                task = await measure({"server": bento.pid}, work)
                if turn >= 0:
                    ours[callers].append(found)
                    theirs[callers].append(peer)
                    tasks[callers].append(task)
            if turn >= 0:
                bare.append((await _bare(house, [_PROMPT], options.seconds)).microseconds)
    _add(report, ours, theirs, tasks, bare)
    _check(report, ours, theirs, tasks, bare)
    return report


async def _load(
    server: Server, request: bytes, callers: int, seconds: float, parts: dict[str, int]
) -> Sample:
    async with connect(server.port, callers) as open_callers:
        return await measure(parts, open_callers.run(lambda: request, seconds, (200,)))


@contextlib.asynccontextmanager
async def _litellm(directory: Path, upstream: Server) -> AsyncIterator[tuple[Server, str]]:
    """LiteLLM's proxy, once it answers; and the key that it wants."""
    key = f"sk-{secrets.token_hex(16)}"
    model = {
        "model_name": MODEL,
        "litellm_params": {
            "model": f"openai/{MODEL}",
            "api_base": f"http://{HOST}:{upstream.port}/v1",
            "api_key": "none",
        },
    }
    config = directory / "litellm.yaml"
    config.write_text(
        yaml.safe_dump({"model_list": [model], "general_settings": {"master_key": key}})
    )
    port = processes.free_port()
    arguments = ["--config", str(config), "--host", HOST, "--port", str(port), "--num_workers", "1"]
    process = processes.spawn(
        [str(PEERS / "litellm"), *arguments],
        log_file=directory / "logs" / "litellm.log",
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        cwd=directory,
    )
    try:
        await _until_up(port)
        yield Server(process.pid, port), key
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def _until_up(port: int) -> None:
    async with (
        asyncio.timeout(_START_SECONDS),
        httpx.AsyncClient(trust_env=False, timeout=5) as client,
    ):
        for _ in range(1_000_000):
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"http://{HOST}:{port}/health/liveliness")).is_success:
                    return
            await asyncio.sleep(0.5)


def _add(
    report: Report,
    ours: dict[int, list[Sample]],
    theirs: dict[int, list[Sample]],
    tasks: dict[int, list[Sample]],
    bare: list[float],
) -> None:
    for name, samples in (("ours", ours), ("LiteLLM", theirs), ("BentoML task", tasks)):
        for callers, found in samples.items():
            rows = [
                (
                    one.load.rate,
                    one.microseconds("server"),
                    one.microseconds("postgres") if "postgres" in one.cpu else 0.0,
                    one.load.milliseconds(0.5),
                    one.load.milliseconds(0.99),
                )
                for one in found
            ]
            figures = [statistics.median(column) for column in zip(*rows, strict=True)]
            report.rows.append((f"{name}, {callers} callers", figures))
            report.raw[f"{name} {callers}"] = [
                {"count": one.load.count, "rate": one.load.rate, "cpu": one.cpu} for one in found
            ]
    report.rows.append(("bare gRPC client", [None, statistics.median(bare), None, None, None]))
    in_all = _costs(ours[_MANY], "server", "postgres")
    bars = [
        Bar("ours, PostgreSQL included", statistics.median(in_all)),
        Bar("bare gRPC client", statistics.median(bare), is_ours=False),
    ]
    peers = {
        "LiteLLM's proxy": _costs(theirs[_MANY], "server"),
        "BentoML task": _costs(tasks[_MANY], "server"),
    }
    bars += [Bar(name, statistics.median(cost), is_ours=False) for name, cost in peers.items()]
    most = statistics.median(peers["LiteLLM's proxy"]) / _TIMES_IN_ALL
    report.plots.append(
        Bars(
            "cpu",
            f"One result, {_MANY} callers",
            "us of CPU per result",
            bars,
            Goal(most, f"goal for ours: 1/{_TIMES_IN_ALL} of LiteLLM's"),
        )
    )


def _costs(samples: list[Sample], *parts: str) -> list[float]:
    return [one.microseconds(*parts) for one in samples]


def _check(
    report: Report,
    ours: dict[int, list[Sample]],
    theirs: dict[int, list[Sample]],
    tasks: dict[int, list[Sample]],
    bare: list[float],
) -> None:
    cost = _costs(ours[_MANY], "server", "postgres")
    peer, task = _costs(theirs[_MANY], "server"), _costs(tasks[_MANY], "server")
    above = [max(1.0, one - least) for one, least in zip(cost, bare, strict=True)]
    in_all = median_ratio(peer, cost)
    report.check("LiteLLM's CPU, of ours in all", in_all, ">=", _TIMES_IN_ALL, "x")
    report.check(
        "BentoML's CPU, of ours above the bare client", median_ratio(task, above), ">=", 8, "x"
    )
    faster = [
        min(
            one.load.median_milliseconds() / other.load.median_milliseconds()
            for one, other in zip(theirs[callers], ours[callers], strict=True)
        )
        for callers in _CALLERS
    ]
    report.check("LiteLLM's p50, of ours, the least of all callers", min(faster), ">=", 1, "x")
    slowest = min(one.load.rate for samples in ours.values() for one in samples)
    report.check("our slowest rate", slowest, ">=", 1, "requests/s")
