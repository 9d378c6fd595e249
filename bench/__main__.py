"""The command: `python -m bench` measures the goals of docs/benchmarks.md."""

import argparse
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bench import (
    embeddings,
    fair,
    fleet,
    hosts,
    index,
    infini_gram,
    jobs,
    k6_load,
    machine,
    mapping,
    p1_submit,
    p2_life,
    p3_peers,
    p4_first_token,
    p5_told,
    p6_poll,
    p7_lists,
    p8_growth,
    p9_memory,
    p10_batching,
    pages,
    queue_libraries,
    report,
    retention,
    scaling,
    t1_token_cost,
    t2_engine_rate,
    t3_token_lag,
)
from bench.cpu import cores_in_use
from bench.report import Options, Report
from bench.servers import House

Goal = Callable[[House, Options], Awaitable[Report]]

_GOALS: dict[str, tuple[Goal, str]] = {
    "p1": (p1_submit.run, "durable submissions; baselines: validate only, one INSERT each"),
    "p2": (p2_life.run, "whole life of a result; baseline: a bare gRPC client"),
    "p3": (
        p3_peers.run,
        "CPU per result; baselines: LiteLLM's proxy, BentoML's tasks (make .venv-peers)",
    ),
    "p4": (
        p4_first_token.run,
        "streams: the first token and those after it; baseline: direct gRPC",
    ),
    "p5": (p5_told.run, "from Triton's answer to its waiting client; baseline: one commit"),
    "p6": (p6_poll.run, "polls by id; baselines: a fixed answer, one SELECT each"),
    "p7": (p7_lists.run, "list pages at depth; baseline: depth 0 of the same query"),
    "p8": (p8_growth.run, "CPU per result as streams, waiters, rows, the queue and workers grow"),
    "t1": (
        t1_token_cost.run,
        "CPU of a token of a running result; baseline: a bare client, one gRPC stream a result",
    ),
    "t2": (t2_engine_rate.run, "tokens/s of real vLLM; baseline: AsyncLLM without a service"),
    "t3": (t3_token_lag.run, "a token's way from the model to its reader, 100 to 500 streams"),
    "fair": (fair.run, "the fair order of the queue; baseline: first in, first out"),
    "queue": (queue_libraries.run, "CPU of the queue alone; baseline: pgqueuer (make .venv-peers)"),
    "fleet": (fleet.run, "one Triton server and two; baseline: one"),
    "pages": (pages.run, "the web page's pages over a long table; bound: 300 ms"),
    "ngram": (infini_gram.run, "infini-gram: count and attribution; baseline: the package alone"),
    "index": (index.run, "results indexed by 1, 2 and 4 processes, and deleted"),
    "retention": (retention.run, "a week of retention, simulated; bound: tables stay as they are"),
    "p10": (
        p10_batching.run,
        "batching on real vLLM, by k6 (make .venv-peers); baseline: one at a time",
    ),
    "jobs": (jobs.run, "rows of a job; baseline: the same rows without a job"),
    "embeddings": (embeddings.run, "vectors of many texts; bound: 100,000 in an hour"),
    "map": (mapping.run, "CPU of the Python client per mapped row; baseline: the bare lists"),
    "k6": (k6_load.run, "load by k6 (make .venv-peers); baseline: a fixed answer"),
    "scaling": (scaling.run, "simulated beside measured; then 1, 10 and 100 hosts"),
    "hosts": (hosts.run, "lives/s of 1, 2 and 4 hosts (network namespaces, as root); simulated"),
    "p9": (p9_memory.run, "memory of the API: idle, with 2,000 long-polls, with 2,000 streams"),
}

_EPILOG = """\
Each goal starts its own API (and worker) beside one real PostgreSQL with fsync on and one real
Triton with the scripted model, all on free ports and in a temporary directory. Baseline and
subject take turns over several rounds; figures are medians, and verdicts are ratios and CPU time
per operation (user and system time of whole process trees), since the speed of a shared machine
is no finding. The load generator's own CPU is not counted. Needed beside what `make bench` makes:
`make .venv-peers`, for p3, queue, p10 and k6.

  python -m bench --quick            every goal in a few seconds each: does it run?
  python -m bench p1 p6              two goals
  python -m bench p7 --rows 10000000 a longer table (about 8 GB of disk)
  python -m bench --record           all of it, and write tables and plots into docs/benchmarks.md

Progress goes to stderr, raw numbers to bench/results/ as JSON, with their plots as
SVG files. The status is 1 when a goal was missed."""


def main() -> int:
    """Measure, print, save; 0 when every check of every goal was met."""
    options = _parse()
    chosen = Options(
        rounds=2 if options.quick else options.rounds,
        seconds=1.0 if options.quick else options.seconds,
        rows=50_000 if options.quick else options.rows,
        corpus=2_000_000 if options.quick else options.corpus,
    )
    with tempfile.TemporaryDirectory(prefix="llm-bench-", dir=options.directory) as name:
        Path(name).chmod(0o755)
        facts, reports = uvloop.run(_measure(Path(name), options.goals or _possible(), chosen))
    path = report.save(reports, facts, chosen)
    print(f"\nRaw numbers: {path}")
    if options.record:
        report.record(reports, facts, chosen)
    return int(any(not check.is_met for done in reports for check in done.checks))


def _parse() -> argparse.Namespace:
    goals = "\n".join(f"  {name}  {text}" for name, (_, text) in _GOALS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measure the performance goals, side by side with their baselines:\n\n{goals}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("goals", nargs="*", metavar="GOAL", help="which goals (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds of 1 s, small tables and corpus"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each arm (5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round (4)")
    parser.add_argument(
        "--rows",
        type=int,
        default=1_000_000,
        help="rows of the tables of P7 and P8, and ten times P8's longest queue (1000000)",
    )
    parser.add_argument(
        "--corpus", type=int, default=50_000_000, help="bytes of ngram's corpus (50000000)"
    )
    parser.add_argument(
        "--directory", type=Path, help="where PostgreSQL's files go (the system's temporary one)"
    )
    parser.add_argument(
        "--record", action="store_true", help="write tables and plots into docs/benchmarks.md"
    )
    options = parser.parse_args()
    for goal in options.goals:
        if goal not in _GOALS:
            parser.error(f"there is no goal {goal!r}; choose from {', '.join(_GOALS)}")
    return options


def _possible() -> list[str]:
    """All goals, less those whose peers are not installed."""
    if p3_peers.PEERS.exists():
        return list(_GOALS)
    left_out = ("p3", "queue", "p10", "k6")
    print(f"{', '.join(left_out)} are left out: `make .venv-peers` installs what they need")
    return [goal for goal in _GOALS if goal not in left_out]


async def _measure(
    directory: Path, goals: list[str], options: Options
) -> tuple[dict[str, object], list[Report]]:
    facts = machine.describe(directory)
    facts["other_load"] = round(await cores_in_use(1.0), 2)
    print(f"{facts['cores']} cores, {facts['other_load']} of them busy with other things")
    reports = []
    async with House(directory) as house:
        facts["postgresql"] = await house.postgres_version()
        for goal in goals:
            run, text = _GOALS[goal]
            print(f"\n{goal.upper()}: {text}", flush=True)
            began = time.monotonic()
            reports.append(await run(house, options))
            reports[-1].seconds = time.monotonic() - began
            reports[-1].method = sys.modules[run.__module__].__doc__ or ""
            print(reports[-1].to_markdown(), flush=True)
    return facts, reports


if __name__ == "__main__":
    sys.exit(main())
