"""P2: the whole life of a result, against a gRPC client that stores and serves nothing.

One call: POST with `Prefer: wait`, a real Triton generates, the result is committed, the caller
has it. Three scripts: an instant one, where the cores are the limit; results of two to six steps of
25 ms, where the model is; and results of four such steps each, which all end in the same step.
"""

import asyncio
import itertools
import os
import statistics
import sys
from collections.abc import Sequence
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
_RATE_SHARES = {"apart": 0.85, "together": 0.95}  # of the bare client's rate
_MOST = {"apart": 650, "together": 450}  # us of CPU of API, worker and PostgreSQL
_SCRIPTS = {
    "instant": ["{{chunks=1}}"],
    "paced": [f"{{{{chunks={steps} delay_ms=25}}}}" for steps in range(2, 7)],
    "in step": ["{{chunks=4 delay_ms=25}}"],
}


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
        for script, prompts in _SCRIPTS.items():
            arms = ((api, parts), (both, of_both))
            progress.show(f"{script}, warm-up")
            for server, measured in arms:
                await _live(server, measured, prompts, _WARM_UP_SECONDS)
            bare: list[_Bare] = []
            lives: list[list[Sample]] = [[], []]
            for turn in range(options.rounds):
                progress.show(
                    f"{script}: bare client, {', '.join(_PLACES.values())}", turn, options.rounds
                )
                bare.append(await _bare(house, prompts, options.seconds))
                for found, (server, measured) in zip(lives, arms, strict=True):
                    found.append(await _live(server, measured, prompts, options.seconds))
            report.rows.append((f"{script}: bare client", _bare_figures(bare)))
            report.raw[f"{script} bare"] = [asdict(one) for one in bare]
            for place, found in zip(_PLACES, lives, strict=True):
                _add(report, script, place, bare, found)
            report.plots.append(_plot(script, bare, lives))
    return report


async def _live(
    api: Server, parts: dict[str, int], prompts: Sequence[str], seconds: float
) -> Sample:
    parameters = {"max_tokens": 16, "temperature": 0}
    requests = itertools.cycle(
        post(
            "/results/",
            orjson.dumps({"model": MODEL, "content": prompt, "parameters": parameters}),
            "Prefer: wait=30\r\n",
        )
        for prompt in prompts
    )
    async with connect(api.port, CALLERS) as callers:
        return await measure(parts, callers.run(lambda: next(requests), seconds, (200,)))


async def _bare(house: House, prompts: Sequence[str], seconds: float) -> _Bare:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.bare_client", house.triton_address, str(CALLERS), str(seconds), *prompts),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env=os.environ | house.triton.environment,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError("the bare client failed")
    measured = orjson.loads(output)
    return _Bare(measured["rate"], measured["cpu"] / measured["count"] * 1e6)


def _add(report: Report, script: str, place: str, bare: list[_Bare], lives: list[Sample]) -> None:
    name = f"{script}, {_PLACES[place]}"
    report.rows.append((name, _life_figures(lives)))
    report.raw[name] = [
        {"count": life.load.count, "rate": life.load.rate, "cpu": life.cpu} for life in lives
    ]
    rate = median_ratio([life.load.rate for life in lives], [one.rate for one in bare])
    report.check(f"{name}: rate, of the bare client's", rate, ">=", _RATE_SHARES[place])
    if script == "instant":
        in_all = statistics.median(_in_all(life) for life in lives)
        report.check(f"{name}: API, worker and Postgres", in_all, "<=", _MOST[place], "us")


def _in_all(life: Sample) -> float:
    """CPU of API, worker and PostgreSQL per result, in us."""
    return life.microseconds(*life.cpu)


def _plot(script: str, bare: list[_Bare], lives: list[list[Sample]]) -> Bars:
    """The unit of a script's goal: CPU, or the rate if the model is the limit."""
    if script != "instant":
        baseline = statistics.median(one.rate for one in bare)
        values = [[life.load.rate for life in found] for found in lives]
        share = _RATE_SHARES["together"]
        goal = Goal(share * baseline, f"goal in one process: {share} of the bare client's")
        name, label = script.replace(" ", "-"), "results per second"
        title = "Where the model is the limit" + ", in step" * (script == "in step")
    else:
        baseline = statistics.median(one.microseconds for one in bare)
        values = [[_in_all(life) for life in found] for found in lives]
        goal = Goal(_MOST["together"], "goal in one process")
        name, title, label = "cpu", "CPU of API, worker and PostgreSQL", "us of CPU per result"
    bars = [
        Bar(place, statistics.median(found))
        for place, found in zip(_PLACES.values(), values, strict=True)
    ]
    bars.append(Bar("bare client", baseline, is_ours=False))
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
