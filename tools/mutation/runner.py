"""Runs the tests of a mutant, in a fork that sees the edit; the file on the disk is not touched."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers import VARIABLE
from tools.mutation.cold import ColdRunner
from tools.mutation.mutants import Mutant
from tools.mutation.selection import Test
from tools.mutation.warm import UNPATCHED, WarmRunner

# Seconds of tests: most mutants fail in the first round. Survivors meet all that fits the second.
ROUNDS_SECONDS = (6.0, 12.0)
_SLACK_SECONDS = 20.0  # for the start, on a loaded machine
_SLOWDOWN = 4.0
# A module that cannot be imported fails the collection, or the loading of a conftest.py.
# A service whose background task fails ends its own process, which is the tests' process, by SIGTERM.
_KILLED = (
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.USAGE_ERROR,
    -signal.SIGTERM,
)


@dataclass(frozen=True)
class Verdict:
    """Verdict of the tests: `killed`, `timeout` (killed too), `survived` or `untested`."""

    outcome: str
    tests: int
    seconds: float
    by: str = ""  # the test that failed first


class Runner:
    """Runs one mutant after the other, with servers of its own.

    `collected` are pytest's arguments for all tests that a mutant may need; without them each mutant
    imports the service again.
    """

    def __init__(
        self, root: Path, servers: dict[str, Any], log: Path, collected: Sequence[str] = ()
    ) -> None:
        os.environ[VARIABLE] = json.dumps([servers])
        self._log = log.absolute()
        self._cold = ColdRunner(root, self._log)
        self._warm = WarmRunner(root, collected, self._log) if collected else None

    def run(
        self,
        mutant: Mutant | None,
        tests: Sequence[Test],
        rounds: Sequence[float] = ROUNDS_SECONDS,
    ) -> Verdict:
        """Run the tests until one fails; without a mutant, all must pass."""
        began, done = time.monotonic(), 0
        for budget in rounds:
            chosen = _take(tests[done:], budget)
            if not chosen:
                break
            done += len(chosen)
            outcome, by = self._run(mutant, chosen)
            if outcome != "survived":
                return Verdict(outcome, done, time.monotonic() - began, by)
        return Verdict("survived" if done else "untested", done, time.monotonic() - began)

    def _run(self, mutant: Mutant | None, tests: Sequence[Test]) -> tuple[str, str]:
        names = [test.name for test in tests]
        limit = _SLACK_SECONDS + _SLOWDOWN * sum(test.seconds for test in tests)
        status: int | None = UNPATCHED
        by = ""
        if self._warm:
            status, by = self._warm.run(mutant, names, limit)
        if status == UNPATCHED:
            status, by = self._cold.run(mutant, names, limit)
        if status is None:
            return "timeout", by
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return "untested", ""
        if status == pytest.ExitCode.OK:
            return "survived", ""
        if status not in _KILLED:
            raise RuntimeError(f"pytest ended with {status}: {self._log.read_text()[-2000:]}")
        return "killed", by


def _take(tests: Sequence[Test], seconds: float) -> list[Test]:
    """Return the first tests, at least one, of so many seconds."""
    taken: list[Test] = []
    for test in tests:
        seconds -= test.seconds
        if seconds < 0 and taken:
            break
        taken.append(test)
    return taken
