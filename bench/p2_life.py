"""P2: the whole life of a result, against a gRPC client that stores and serves nothing.

One call: POST with `Prefer: wait`, a real Triton generates, the result is committed, the caller
has it. Two scripts: an instant one, where the cores are the limit, and a paced one of 100 ms,
where the model is.
"""

import asyncio
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from bench import progress
from bench.cpu import Sample, measure
from bench.load import connect, post
from bench.plots import Bar, Bars, Goal
from bench.report import Options, Report, median_ratio
from bench.servers import MODEL, House, Server

CALLERS = 64
_PLACES = {"apart": "worker apart", "together": "one process"}
_WARM_UP_SECONDS = 1.0
_RATE_SHARE = 0.85  # of the bare client's rate, where the model is the limit
_ABOVE = 250  # us of CPU above the bare client's
_SCRIPTS = {"instant": "Write it. {{chunks=1}}", "paced": "Write it. {{chunks=4 delay_ms=25}}"}


@dataclass(slots=True, frozen=True)
class _Bare:
    rate: float
    microseconds: float  # of CPU per generation


async def run(house: House, options: Options) -> Report:
    """Measure both arms in turn, script by script."""
    apart, together = [await house.environment(f"bench_p2_{name}") for name in _PLACES]
    report = Report(
        "P2",
        "whole life of a result",
        ["results/s", "bare client us", "API us", "worker us", "Postgres us", "p50 ms", "p99 ms"],
    )
    async with (
        house.api(apart) as api,
        house.worker(apart) as worker,
        house.api(together, with_worker=True) as both,
    ):
        parts = {"api": api.pid, "worker": worker.pid, "postgres": house.postgres_pid}
        of_both = {"api": both.pid, "postgres": house.postgres_pid}
        for script, prompt in _SCRIPTS.items():
            arms = ((api, parts), (both, of_both))
            progress.show(f"{script}, warm-up")
            for server, measured in arms:
                await _live(server, measured, prompt, _WARM_UP_SECONDS)
            bare: list[_Bare] = []
            lives: list[list[Sample]] = [[], []]
            for turn in range(options.rounds):
                progress.show(
                    f"{script}: bare client, {', '.join(_PLACES.values())}", turn, options.rounds
                )
                bare.append(await _bare(house, prompt, options.seconds))
                for found, (server, measured) in zip(lives, arms, strict=True):
                    found.append(await _live(server, measured, prompt, options.seconds))
            report.rows.append((f"{script}: bare client", _bare_figures(bare)))
            report.raw[f"{script} bare"] = [asdict(one) for one in bare]
            for place, found in zip(_PLACES.values(), lives, strict=True):
                _add(report, script, place, bare, found)
            report.plots.append(_plot(script, bare, lives))
    return report


async def _live(api: Server, parts: dict[str, int], prompt: str, seconds: float) -> Sample:
    body = orjson.dumps(
        {
            "model": MODEL,
            "content": prompt,
            "parameters": {"max_tokens": 16, "temperature": 0},
        }
    )
    request = post("/results/", body, "Prefer: wait=30\r\n")
    async with connect(api.port, CALLERS) as callers:
        return await measure(parts, callers.run(lambda: request, seconds, (200,)))


async def _bare(house: House, prompt: str, seconds: float) -> _Bare:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.bare_client", house.triton_address, str(CALLERS), str(seconds), prompt),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError("the bare client failed")
    measured = orjson.loads(output)
    return _Bare(measured["rate"], measured["cpu"] / measured["count"] * 1e6)


def _add(report: Report, script: str, place: str, bare: list[_Bare], lives: list[Sample]) -> None:
    name = f"{script}, {place}"
    report.rows.append((name, _life_figures(lives)))
    report.raw[name] = [
        {"count": life.load.count, "rate": life.load.rate, "cpu": life.cpu} for life in lives
    ]
    if script == "paced":
        ours, theirs = [life.load.rate for life in lives], [one.rate for one in bare]
        rate = median_ratio(ours, theirs)
        report.check(f"{name}: rate, of the bare client's", rate, ">=", _RATE_SHARE)
        return
    above = statistics.median(
        _ours(life) - one.microseconds for life, one in zip(lives, bare, strict=True)
    )
    report.check(f"{name}: API + worker above the bare client", above, "<=", _ABOVE, "us")
    postgres = statistics.median(life.microseconds("postgres") for life in lives)
    report.check(f"{name}: Postgres CPU per result", postgres, "<=", 150, "us")


def _ours(life: Sample) -> float:
    """CPU of API and worker per result, in us."""
    return life.microseconds(*(part for part in life.cpu if part != "postgres"))


def _plot(script: str, bare: list[_Bare], lives: list[list[Sample]]) -> Bars:
    """The unit of a script's goal: CPU, or the rate if the model is the limit."""
    if script == "paced":
        most = statistics.median(one.rate for one in bare)
        values = [[life.load.rate for life in found] for found in lives]
        goal = Goal(_RATE_SHARE * most, f"goal for ours: {_RATE_SHARE} of the bare client's")
        name, title, label = "rate", "Where the model is the limit", "results per second"
    else:
        most = statistics.median(one.microseconds for one in bare)
        values = [[_ours(life) for life in found] for found in lives]
        goal = Goal(most + _ABOVE, f"goal for ours: {_ABOVE} us above the bare client")
        name, title, label = "cpu", "CPU of API and worker", "us of CPU per result"
    bars = [
        Bar(place, statistics.median(found))
        for place, found in zip(_PLACES.values(), values, strict=True)
    ]
    bars.append(Bar("bare client", most, is_ours=False))
    return Bars(name, f"{title}, {CALLERS} callers", label, bars, goal)


def _bare_figures(bare: list[_Bare]) -> list[float | None]:
    rate = statistics.median(one.rate for one in bare)
    return [rate, statistics.median(one.microseconds for one in bare), *[None] * 5]


def _life_figures(lives: list[Sample]) -> list[float | None]:
    figures = zip(
        *(
            (
                life.load.rate,
                life.microseconds("api"),
                life.microseconds("worker") if "worker" in life.cpu else 0.0,
                life.microseconds("postgres"),
                life.load.milliseconds(0.5),
                life.load.milliseconds(0.99),
            )
            for life in lives
        ),
        strict=True,
    )
    rate, *rest = (statistics.median(values) for values in figures)
    return [rate, None, *rest]
