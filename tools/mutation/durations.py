"""A pytest plugin that writes how long each test that passed took, in seconds, as JSON."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

_seconds: Counter[str] = Counter()
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration  # type: ignore[assignment] # a counter of floats
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        passed = {test: round(value, 3) for test, value in _seconds.items() if test not in _failed}
        Path(os.environ["MUTATION_DURATIONS"]).write_text(json.dumps(passed))
