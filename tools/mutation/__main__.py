"""The command of `make mutate`.

It plants one fault after the other in the rooms of app/, runs the tests that run the faulty line,
and lists the faults that no test finds. Verdicts are kept in .mutation/: an interrupted run goes on
where it stopped, and a changed definition is judged again.
"""

import argparse
import math
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from tools.mutation import results as report
from tools.mutation.mutants import Mutant, find_mutants
from tools.mutation.results import Results
from tools.mutation.runner import ROUNDS_SECONDS, Runner
from tools.mutation.selection import COLLECTED, Selection, Test, mirrored_tests, named_tests, record
from tools.mutation.servers import start_servers

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / ".mutation"
ROOMS = ("queue", "worker", "results", "auth", "webhooks", "inference")


def main() -> int:
    options = _parser().parse_args()
    DIRECTORY.mkdir(exist_ok=True)
    results = Results(DIRECTORY / "results.jsonl")
    equivalents = report.read_equivalents()
    mutants = _chosen(options)
    if options.record:
        record(ROOT, DIRECTORY, options.jobs)
    if not options.report:
        if options.survivors:
            todo = report.survivors(mutants, results, equivalents)
        else:
            todo = [one for one in mutants if not results.get(one) and one.name not in equivalents]
        random.Random(options.seed).shuffle(todo)  # noqa: S311 - a sample, no secret
        _run(todo[: options.sample], options)
        results = Results(DIRECTORY / "results.jsonl")
    left = report.survivors(mutants, results, equivalents)
    for mutant in left:
        verdict = results.get(mutant)
        note = ", run by no test" if verdict and verdict.outcome == "untested" else ""
        print(f"{mutant.name} (line {mutant.lines[0]}{note})")
    found = report.scores(mutants, results, equivalents)
    print(f"\n{report.table(found)}")
    if waiting := sum(not results.get(one) and one.name not in equivalents for one in mutants):
        print(f"{waiting} more mutants have no verdict yet")
    if options.sample:
        return 0  # too few to be a score
    return int(any(one.percent < one.goal for one in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS, help="rooms or files of app/")
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--changed", metavar="BRANCH", help="only mutants of lines changed since it"
    )
    parser.add_argument("--survivors", action="store_true", help="judge the survivors again")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="these tests, not the recorded")
    parser.add_argument(
        "--record", action="store_true", help="record again which test runs which line"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--report", action="store_true", help="only print what is known")
    return parser


def _chosen(options: argparse.Namespace) -> list[Mutant]:
    places = [name if name.endswith(".py") else f"app/{name}/*.py" for name in options.rooms]
    listing = subprocess.check_output(["git", "ls-files", *places], cwd=ROOT, text=True)  # noqa: S603, S607
    mutants = [mutant for path in listing.split() for mutant in find_mutants(ROOT, path)]
    if options.changed:
        changed = _changed_lines(options.changed)
        mutants = [one for one in mutants if changed.get(one.path, set()) & set(one.lines)]
    return mutants


def _changed_lines(branch: str) -> dict[str, set[int]]:
    """Return the lines of the working tree that differ from where the branch was left."""
    git = ["git", "-C", str(ROOT)]
    base = subprocess.check_output([*git, "merge-base", "HEAD", branch], text=True).strip()  # noqa: S603
    diff = subprocess.check_output([*git, "diff", "-U0", base, "--", "app"], text=True)  # noqa: S603
    lines: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif line.startswith("@@"):
            first, _, count = line.split("+")[1].split(" ")[0].partition(",")
            lines.setdefault(path, set()).update(range(int(first), int(first) + int(count or 1)))
    return lines


def _run(mutants: Sequence[Mutant], options: argparse.Namespace) -> None:
    if not mutants:
        return
    print(f"{len(mutants)} mutants; the tests run first without any", flush=True)
    jobs = min(options.jobs, len(mutants))
    if not (options.changed or options.tests or _is_recorded()):
        print("recording which test runs which line", flush=True)
        record(ROOT, DIRECTORY, options.jobs)
    next_one = multiprocessing.Value("i", 0)
    with start_servers(ROOT, jobs) as servers:
        workers = [
            multiprocessing.get_context("fork").Process(
                target=_work, args=(number, mutants, options, next_one, servers[number])
            )
            for number in range(jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("A process ended early, see above; the next run goes on from here.")


def _work(
    number: int,
    mutants: Sequence[Mutant],
    options: argparse.Namespace,
    next_one: "Synchronized[int]",
    servers: dict[str, Any],
) -> None:
    """Judge mutants until none is left; several processes share them."""
    collected = COLLECTED if not options.tests and _is_recorded() else ()
    runner = Runner(ROOT, servers, DIRECTORY / f"output-{number}.log", collected)
    results = Results(DIRECTORY / "results.jsonl")
    tests_of = _tests_of(options)
    rounds = (ROUNDS_SECONDS[0], math.inf) if options.tests else ROUNDS_SECONDS
    passed = False
    for place in _places(next_one, len(mutants)):
        mutant = mutants[place]
        tests = tests_of(mutant)
        if not passed and runner.run(None, tests, rounds).outcome not in ("survived", "untested"):
            raise SystemExit(f"tests fail without a fault: {DIRECTORY}/output-{number}.log")
        passed = True
        verdict = runner.run(mutant, tests, rounds)
        results.add(mutant, verdict)
        sign = "." if verdict.outcome in ("killed", "timeout") else verdict.outcome
        print(f"{place + 1}/{len(mutants)} {sign} {mutant.name}", flush=True)


def _places(next_one: "Synchronized[int]", count: int) -> Iterator[int]:
    while True:
        with next_one.get_lock():
            place = next_one.value
            next_one.value += 1
        if place >= count:
            return
        yield place


def _tests_of(options: argparse.Namespace) -> Callable[[Mutant], list[Test]]:
    if options.tests:
        named = named_tests(ROOT, options.tests)
        return lambda _: named
    if _is_recorded():
        return Selection(ROOT, DIRECTORY).tests
    return partial(mirrored_tests, ROOT)


def _is_recorded() -> bool:
    return (DIRECTORY / "durations.json").exists()


if __name__ == "__main__":
    sys.exit(main())
