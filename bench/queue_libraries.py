"""QUEUE: CPU per job of the queue alone, ours beside pgqueuer's, on the same PostgreSQL.

A job of either does nothing: it is stored, claimed and ended, with no HTTP and no model between.
Ours uses the statements of `app.queue.job_queue` (a result with its prompt, listeners notified,
noted to be made searchable), pgqueuer 1.6 as its guide recommends it, durable, from `.venv-peers`
(`make .venv-peers`). 64 callers store one job a call, as requests come; or lists of 20. First
all are stored, then all are run; then as many again are stored and run at the same time. CPU is that
of the process and of PostgreSQL. pgqueuer's worker takes 10 jobs at a time, its default, or 100; it is
judged by what costs it less.
"""

import asyncio
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from bench import progress
from bench.cpu import tree_seconds
from bench.p3_peers import PEERS
from bench.plots import Bar, Bars, Goal
from bench.report import Options, Report, median_ratio
from bench.servers import House

_CALLERS = 64
_LIST = 20
_JOBS_A_SECOND = 1000  # of the length of a round
_GOAL = 10
_STEPS = ("stored", "run", "at once")
_COLUMNS = [
    *("stored: process us", "Postgres us", "run: process us", "Postgres us "),
    *("at once: process us", " Postgres us", "at once, jobs/s"),
]
_ROOT = Path(__file__).resolve().parents[1]
_PGQUEUER = PEERS / "pgq"


@dataclass(slots=True, frozen=True)
class _Arm:
    """A way to use a queue: jobs a call, and what pgqueuer's worker takes at a time (0: ours)."""

    length: int
    batch: int = 0


_ARMS = {
    "ours, one a call": _Arm(1),
    f"ours, lists of {_LIST}": _Arm(_LIST),
    "pgqueuer, one a call, 10 at a time": _Arm(1, 10),
    "pgqueuer, one a call, 100 at a time": _Arm(1, 100),
    f"pgqueuer, lists of {_LIST}, 100 at a time": _Arm(_LIST, 100),
}


@dataclass(slots=True)
class _Round:
    """One round of an arm, by step: CPU per job in us, of its process and of PostgreSQL."""

    process: dict[str, float] = field(default_factory=dict)
    postgres: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # jobs a second

    def together(self, *steps: str) -> float:
        """CPU of these steps, of both."""
        return sum(self.process[step] + self.postgres[step] for step in steps)


async def run(house: House, options: Options) -> Report:
    """Measure the arms in turn, each on a database of its own each time."""
    if not _PGQUEUER.exists():
        raise RuntimeError("pgqueuer is not installed: run `make .venv-peers`")
    each = _CALLERS * _LIST
    jobs = max(1, round(_JOBS_A_SECOND * options.seconds / each)) * each
    rounds: dict[str, list[_Round]] = {name: [] for name in _ARMS}
    for turn in range(options.rounds):
        for place, (name, arm) in enumerate(_ARMS.items()):
            progress.show(f"{name}, {jobs:,} jobs", turn, options.rounds)
            rounds[name].append(await _measure(house, f"bench_queue_{turn}_{place}", arm, jobs))
    return _report(rounds, jobs)


async def _measure(house: House, database: str, arm: _Arm, jobs: int) -> _Round:
    arguments = [str(jobs), str(_CALLERS), str(arm.length)]
    if arm.batch:
        environment = await _peers_environment(house, database)
        command = [str(PEERS / "python"), "-m", "bench.pgqueuer_part", *arguments, str(arm.batch)]
    else:
        environment = await house.environment(database)
        command = [sys.executable, "-m", "bench.queue_part", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        cwd=_ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    found = _Round()
    for step in _STEPS:
        before = tree_seconds(house.postgres_pid)
        process.stdin.write(b"\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the queue's process failed; see above: {' '.join(command)}")
        measured = orjson.loads(line)
        spent = tree_seconds(house.postgres_pid) - before
        found.process[step] = measured["cpu"] / jobs * 1e6
        found.postgres[step] = spent / jobs * 1e6
        found.rates[step] = jobs / measured["seconds"]
    await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the queue's process failed; see above: {' '.join(command)}")
    return found


async def _peers_environment(house: House, database: str) -> Mapping[str, str]:
    """The address of a new, empty database."""
    connection = await house.connect("postgres")
    await connection.execute(f"CREATE DATABASE {database}")
    await connection.close()
    return {**os.environ, **house.libpq_environment, "PGDATABASE": database}


def _report(rounds: Mapping[str, list[_Round]], jobs: int) -> Report:
    report = Report("QUEUE", "CPU per job of the queue alone", _COLUMNS)
    for name, found in rounds.items():
        figures = zip(*map(_figures, found), strict=True)
        report.rows.append((name, [statistics.median(values) for values in figures]))
        report.raw[name] = [asdict(one) for one in found]
    report.notes.append(f"{jobs:,} jobs a round.")
    for when, steps in (("stored, then run", ("stored", "run")), ("at once", ("at once",))):
        cost = {name: [one.together(*steps) for one in found] for name, found in rounds.items()}
        ours, our_lists, by_default, tuned, their_lists = cost.values()
        theirs = min(by_default, tuned, key=statistics.median)
        ratio = median_ratio(theirs, ours)
        report.check(f"{when}, one a call: pgqueuer's CPU, of ours", ratio, ">=", _GOAL, "x")
        report.notes.append(
            f"{when}, lists of {_LIST}: pgqueuer's CPU is "
            f"{median_ratio(their_lists, our_lists):.1f} times ours."
        )
        report.plots.append(
            Bars(
                steps[-1].replace(" ", "-"),
                f"One job of a queue; {when}",
                "us of CPU per job, process and PostgreSQL",
                [
                    Bar(name, statistics.median(found), is_ours=name.startswith("ours"))
                    for name, found in cost.items()
                ],
                Goal(
                    statistics.median(theirs) / _GOAL,
                    f"goal for ours, one a call: a {_GOAL}th of pgqueuer's",
                ),
            )
        )
    return report


def _figures(one: _Round) -> list[float]:
    """See `_COLUMNS`."""
    costs = [part[step] for step in _STEPS for part in (one.process, one.postgres)]
    return [*costs, one.rates["at once"]]
