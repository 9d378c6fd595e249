"""Health check and supervisor of a Triton server. Needs Linux and Python 3.9, and nothing else.

    python3 health check                     exit 0: healthy; 1: one line with the reason
    python3 health run -- tritonserver ...   run it, and restart it when it ended or is ill

`run` copies the server's output and writes a line of its own for each event to standard error.
With a secret in LLM_TRITON_SECRET, `run` restricts the server to requests with it (access.py).
SIGTERM and SIGINT end the server with SIGTERM; the exit status is the server's. When the supervisor is
killed, the server and everything it started is killed with it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from access import restrict
from check import Report, Server, check
from family import keep
from supervisor import Limits, Supervisor


def main() -> int:
    """Run one command; the exit status."""
    if sys.argv[1:2] == ["keep"]:  # by the supervisor
        return keep(int(sys.argv[2]), sys.argv[4:])
    options = _parser().parse_args()
    secret = os.environ.get("LLM_TRITON_SECRET", "")
    server = Server(options.http, options.metrics, options.timeout, secret)
    if options.verb == "check":
        report = check(server, options.min_ready)
        print(report.reason or f"healthy: {report.ready} models answer")
        return 1 if report.problems else 0
    limits = Limits(
        interval=options.interval,
        failures=options.failures,
        start_seconds=options.start_seconds,
        stop_seconds=options.stop_seconds,
        crash_seconds=options.crash_seconds,
        restarts=options.restarts,
        must_start=options.must_start,
    )

    def new_check() -> Callable[[], Report]:
        seen: dict[str, object] | None = {} if options.only_used else None
        return lambda: check(server, options.min_ready, seen)

    return Supervisor(restrict(options.command, secret), new_check, limits).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="health", description="Health of a Triton server")
    verbs = parser.add_subparsers(dest="verb", required=True)
    checking = verbs.add_parser("check", help="generate one token with every ready model")
    running = verbs.add_parser("run", help="run a server and restart it when it ended or is ill")
    for verb, min_ready in ((checking, 1), (running, 0)):
        _add(verb, "--http", _address, os.environ.get("TRITON_HTTP_SERVICE") or "127.0.0.1:8000",
             "HOST:PORT of HTTP (TRITON_HTTP_SERVICE)")  # fmt: skip
        _add(verb, "--metrics", _address, os.environ.get("TRITON_METRICS_SERVICE") or "127.0.0.1:8002",
             "HOST:PORT of the metrics (TRITON_METRICS_SERVICE)")  # fmt: skip
        _add(verb, "--timeout", _seconds, 10.0, "seconds for one answer")
        _add(verb, "--min-ready", _count, min_ready, "fewer ready models are a failure")
    _add(running, "--interval", _seconds, 10.0, "seconds between checks")
    _add(running, "--failures", _positive, 3, "failed checks in a row that end the server")
    _add(running, "--start-seconds", float, 0.0, "end a server not healthy so soon; 0: never")
    _add(running, "--stop-seconds", _seconds, 35.0, "time for a server to end by SIGTERM")
    _add(running, "--crash-seconds", _seconds, 5.0, "time to end after a crash was logged")
    _add(running, "--restarts", int, -1, "most restarts; -1: any number")
    running.add_argument("--must-start", action="store_true",
                         help="exit if the server ends before a model was ready")  # fmt: skip
    running.add_argument("--only-used", action="store_true",
                         help="probe models that had requests since their last probe")  # fmt: skip
    running.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    return parser


def _add(
    parser: argparse.ArgumentParser,
    name: str,
    kind: Callable[[str], object],
    default: object,
    text: str,
) -> None:
    parser.add_argument(name, type=kind, default=default, help=f"{text} (default {default})")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too few")
    return value


if __name__ == "__main__":
    sys.exit(main())
