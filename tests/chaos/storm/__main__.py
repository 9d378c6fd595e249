"""The command: `python -m tests.chaos.storm` (`make chaos`)."""

import argparse
import dataclasses
import os
import secrets
import sys
import tempfile
from pathlib import Path

import orjson
import uvloop

from tests.chaos.storm import report, storm
from tests.chaos.storm.outcome import Options, Outcome

_EPILOG = """\
It raises PostgreSQL (durable, with a standby), two tritonservers with the scripted model, one whose
model fails as NVIDIA's vLLM backend does, and one with vLLM, two APIs (one of them a worker too),
two workers, and a TCP proxy on each way between them. Then a crowd of clients sends requests of all
dialects while processes are killed, stopped and frozen, the standby takes the primary's place, and
networks are cut, refused, slowed and left half open. At the end each response that a client received
is checked against the database: lost, doubled, stuck, wrong bytes, and the rest of docs/chaos.md. The
status is 1 if anything is found.

  make chaos                          ten minutes
  make chaos MINUTES=1 SEED=4711      a minute of a seed's failures and requests, again

A seed decides the failures (what, when, how long) and each request; how they meet is the machine's."""


def main() -> int:
    """Run and report; True if every invariant held."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.storm",
        description="Everything at once: a load of all dialects while every part fails.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seed", default="", help="what decides chance (default: a new one)")
    parser.add_argument("--clients", type=int, default=48, help="how many at a time (48)")
    parser.add_argument(
        "--pause", type=float, default=4.0, help="seconds between failures, on average (4)"
    )
    parser.add_argument(
        "--light", action="store_true", help="without the tritonserver that runs vLLM"
    )
    parser.add_argument(
        "--directory", type=Path, help="keep data, logs and report there (default: a new one)"
    )
    given = parser.parse_args()
    options = Options(
        given.seed or secrets.token_hex(4),
        given.minutes * 60,
        given.clients,
        given.pause,
        not given.light,
    )
    directory = given.directory or Path(tempfile.mkdtemp(prefix="llm-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    outcome = uvloop.run(storm.run(directory, options, _print))
    _keep(directory, outcome)
    text = report.to_markdown(outcome)
    (directory / "report.md").write_text(text)
    _print(f"\n{text}\nReport, the clients' log and the logs of all processes: {directory}")
    return int(not outcome.account.is_clean)


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _keep(directory: Path, outcome: Outcome) -> None:
    with (directory / "clients.jsonl").open("wb") as file:
        for order in outcome.scene.log.orders:
            file.write(orjson.dumps(dataclasses.asdict(order)) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
