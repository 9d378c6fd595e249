"""The goal `map`: CPU, time and memory of the Python client that maps a model over a data set."""

import asyncio
import json
import os
import statistics
import sys
from pathlib import Path

from bench import progress
from bench.report import Options, Report
from bench.servers import House, Server

_ROWS = 100_000
_ROOT = Path(__file__).resolve().parents[1]


async def run(house: House, options: Options) -> Report:
    """Map rows with the client, and send them bare, in turn; each round on an empty database."""
    count = min(options.rows, _ROWS)
    columns = ["CPU us/row", "rows/s", "MB at a fifth", "MB at the end"]
    report = Report("map", f"{count:,} rows mapped by the Python client", columns)
    clients: list[list[float]] = []
    bares: list[float] = []
    for turn in range(options.rounds):
        environment = await house.environment(f"bench_map_{turn}")
        async with house.api(environment) as api, house.worker(environment):
            progress.show(f"round {turn + 1}: bare")
            bares += await _program(house, api, "bare", count, turn)
            progress.show(f"round {turn + 1}: the client")
            clients.append(await _program(house, api, "client", count, turn))
    cpu, seconds, early, late = (statistics.median(one) for one in zip(*clients, strict=True))
    bare = statistics.median(bares)
    report.rows = [
        ("client", [cpu / count * 1e6, count / seconds, early, late]),
        ("bare lists, sent and waited for", [None, count / bare, None, None]),
    ]
    report.check("CPU of the client per row", cpu / count * 1e6, "<=", 30, "us")
    report.check("wall time, of the bare lists'", seconds / bare, "<=", 1.1)
    report.check("memory at the end, of that at a fifth of the rows", late / early, "<=", 1.1)
    return report


async def _program(house: House, api: Server, arm: str, count: int, turn: int) -> list[float]:
    """Run a program of bench/mapping_client.py; the numbers that it prints."""
    out = house.directory / f"answers-{turn}.jsonl"
    url = f"http://127.0.0.1:{api.port}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.mapping_client", arm, url, str(count), out, cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT / "client")}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the program {arm} failed")
    found: list[float] = json.loads(output)
    return found
