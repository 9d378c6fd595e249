"""The command: `python -m tests.security.hostile` (`make attack`)."""

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

import uvloop

from app.cli.up.triton import EmbeddedTriton
from tests.conftest import SCRIPTED, make_settings, migrate, run_triton
from tests.pooling_models import pooling_entries
from tests.postgres import start_postgres
from tests.security.hostile.attack_process import ATTACKS
from tests.security.hostile.run import Options, Outcome, run

_GIB = 2**30
_MAX_RATIO = 3.0  # of the polite team's p99, beside to alone
_DATABASE = "hostile"
_EPILOG = """\
It raises PostgreSQL, a tritonserver with the scripted model, two APIs and a worker, the latter three within 1 GiB of
memory each, measures a polite team alone for a tenth of the time, and then beside a hostile team with a
valid key; at last, for a tenth of the time each, with one of the APIs, and beside results that lose their engine
(docs/state_machine.md: they may take a model from the others for a share of its time). The status is 1 if the polite team loses a
result, sees an error or a wrong text, or waits more than three times as long (p99, with two APIs) as alone, for the
acceptance of a result or for the whole; if the totals lack one of its results after 20 s; if a process ends; or if
any response to the hostile team has a status of 500 or more (but 503, and 529 of Messages, with Retry-After), or the
polite team's text.

  make attack                          ten minutes
  make attack MINUTES=1 SEED=4711      a minute of a seed's requests, again"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.security.hostile",
        description="A hostile team beside a polite one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="how long (10)")
    add("--seed", default="", help="what decides the requests (default: a new one)")
    add("--attackers", type=int, default=8, help="attacks at a time (8)")
    add(
        "--scale",
        type=float,
        default=1.0,
        help="size of the largest requests; 1: what is accepted (1)",
    )
    add("--streams", type=int, default=1000, help="streams that one attack opens (1000)")
    add("--memory", type=float, default=1.0, help="GiB of each process; 0: no limit (1)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of API and worker",
    )
    add(
        "--only", nargs="+", choices=ATTACKS, default=ATTACKS, metavar="ATTACK", help="some of them"
    )
    given = parser.parse_args()
    seconds = given.minutes * 60
    options = Options(
        given.seed or secrets.token_hex(4), seconds / 10, seconds, given.attackers, given.scale, given.streams,
        int(given.memory * _GIB) or None,
        dict(one.split("=", 1) for one in given.set), given.only,
    )  # fmt: skip
    outcome = _run(options)
    _print(_report(outcome))
    return int(bool(outcome.faults) or _ratio(outcome) > _MAX_RATIO)


def _run(options: Options) -> Outcome:
    directory = Path(tempfile.mkdtemp(prefix="llm-attack-"))
    directory.chmod(0o755)
    _print(f"Seed {options.seed}. Logs of all processes: {directory}")
    with start_postgres(directory) as postgres:
        asyncio.run(postgres.execute(f"CREATE DATABASE {_DATABASE}"))
        migrate(make_settings(postgres, _DATABASE))
        models = SCRIPTED | pooling_entries(directory / "pooling")
        with run_triton(EmbeddedTriton, directory / "triton", models) as triton:
            return uvloop.run(run(directory, postgres, _DATABASE, triton, options, _print))


def _report(outcome: Outcome) -> str:
    account = outcome.account
    lines = [f"{'attack':24} {'requests':>8} {'slowest':>8}  statuses"]
    for attack, found in sorted(account.statuses.items()):
        statuses = ", ".join(f"{status} x {count:,}" for status, count in sorted(found.items()))
        slowest = account.slowest.get(attack, 0.0)
        lines.append(f"{attack:24} {sum(found.values()):8,} {slowest:6.1f} s  {statuses}")
    lines += [f"limit of {name}: {limit}" for name, limit in outcome.limits.items()]
    lines += [
        f"peak of {name}: {peak / 2**20:.0f} MiB" for name, peak in outcome.peak_bytes.items()
    ]
    lines += [f"WRONG: {fault}" for fault in outcome.faults[:50]]
    lines += [
        f"{account.requests:,} hostile requests, {len(outcome.faults)} faults",
        f"polite team alone:                  {outcome.alone}",
        f"beside, two API processes:          {outcome.beside}; p99 {_ratio(outcome):.1f} times",
        f"beside, one API process (not judged): {outcome.beside_one};"
        f" p99 {outcome.beside_one.worst_ratio(outcome.alone):.1f} times",
        f"beside suspects (not judged):       {outcome.beside_suspects};"
        f" longest {max(outcome.beside_suspects.whole, default=0.0):.1f} s",
        f"longest until a polite result is counted: {outcome.uncounted_seconds:.1f} s",
    ]
    return "\n".join(lines)


def _ratio(outcome: Outcome) -> float:
    return outcome.beside.worst_ratio(outcome.alone)


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
