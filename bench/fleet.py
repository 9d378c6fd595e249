"""FLEET: one Triton server against two, where each is given eight results at a time.

The model takes its time (50 ms a chunk), so that places are the limit and no core is. Both arms are
one process of API and worker with a database of its own; the only difference is that
TRITON_GRPC_SERVICE names one server or two.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import orjson

from app.cli.up.triton import EmbeddedTriton
from bench import progress
from bench.load import Load, connect, post
from bench.report import Options, Report, median_ratio
from bench.servers import MODEL, House, Server

_SLOTS = 8
_CALLERS = 64
_CHUNKS, _DELAY_MS = 10, 50
_ROOT = Path(__file__).resolve().parents[1]


async def run(house: House, options: Options) -> Report:
    """Measure both in turn."""
    report = Report(
        "FLEET",
        "one server and two",
        ["results/s", "p50 ms", "p99 ms"],
    )
    async with second_server(house) as second:
        await _measure(house, options, report, second)
    return report


@contextlib.asynccontextmanager
async def second_server(house: House) -> AsyncIterator[str]:
    """Another Triton with the same model; its gRPC address."""
    second = EmbeddedTriton(
        _ROOT / ".venv-triton",
        house.directory / "triton-2",
        {MODEL: _ROOT / "triton" / "models" / MODEL},
        house.directory / "logs" / "triton-2.log",
    )
    second.secret = house.triton.secret
    await second.start()
    try:
        yield second.address("grpc")
    finally:
        await second.stop()


async def _measure(house: House, options: Options, report: Report, second: str) -> None:
    slots = {"LLM_WORKER_SLOTS": str(_SLOTS)}
    one = await house.environment("bench_fleet_1") | slots
    two = await house.environment("bench_fleet_2") | slots
    two["TRITON_GRPC_SERVICE"] = f"{house.triton_address},{second}"
    loads: dict[str, list[Load]] = {"one server": [], "two servers": []}
    async with house.api(one, with_worker=True) as small, house.api(two, with_worker=True) as large:
        for turn in range(-1, options.rounds):  # the first one warms up
            for name, api in (("one server", small), ("two servers", large)):
                progress.show(name, turn, options.rounds)
                load = await _load(api, max(options.seconds, 2.0))
                if turn >= 0:
                    loads[name].append(load)
    for name, measured in loads.items():
        middle = sorted(measured, key=lambda load: load.rate)[len(measured) // 2]
        report.rows.append(
            (name, [middle.rate, middle.median_milliseconds(), middle.milliseconds(0.99)])
        )
    most = _SLOTS / (_CHUNKS * _DELAY_MS / 1000)
    report.notes.append(f"{_SLOTS} places of {_CHUNKS * _DELAY_MS} ms: {most:.0f} a second at most")
    rates = {name: [load.rate for load in measured] for name, measured in loads.items()}
    ratio = median_ratio(rates["two servers"], rates["one server"])
    report.check("two servers: rate, of one's", ratio, ">=", 1.8)


async def _load(api: Server, seconds: float) -> Load:
    prompt = f"Write it. {{{{chunks={_CHUNKS} delay_ms={_DELAY_MS}}}}}"
    request = post(
        "/results/", orjson.dumps({"model": MODEL, "content": prompt}), "Prefer: wait=30\r\n"
    )
    async with connect(api.port, _CALLERS) as callers:
        return await callers.run(lambda: request, seconds, (200,))
