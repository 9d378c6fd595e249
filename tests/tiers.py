"""Tiers of tests: `make trial` runs those marked `trial`, and `make test` all others.

All of `tests/e2e`, `tests/browser` and `tests/chaos` are trials; others have the mark themselves. `make test`
has tests of up to two seconds. One that needs longer and belongs there has the mark `slow` with its reason.
With `--strict-tiers`, as in .ci/run, any other test that takes twice as long fails: machines differ, and are busy. So does
one that is skipped.
"""

import time
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

_FAST_SECONDS = 2.0
_MOST_SECONDS = 2 * _FAST_SECONDS
_TRIAL_SECONDS = 240.0  # after which a trial without a limit of its own hangs; pyproject.toml has that of the others
# A machine that stalls, or is busy, makes any test slow once.
_MEASUREMENTS = 3
_TESTS = Path(__file__).resolve().parent
_TRIALS = tuple(_TESTS / folder for folder in ("e2e", "browser", "chaos"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-tiers",
        action="store_true",
        help=f"fail tests of over {_MOST_SECONDS:g} s without the mark trial or slow, and skipped ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--strict-tiers"):
        config.pluginmanager.register(Measurement())


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_trial = any(folder in item.path.parents for folder in _TRIALS)
        if is_trial and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.trial)
        has_limit = item.get_closest_marker("timeout") is not None
        if not has_limit and item.get_closest_marker("trial") is not None:
            item.add_marker(pytest.mark.timeout(_TRIAL_SECONDS))


class Measurement:
    """The time of each test and of its own fixtures; servers that tests share do not count."""

    def __init__(self) -> None:
        self._own = 0.0  # s, of the test that runs
        self._depth = 0  # of shared fixtures that begin
        self._has_failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        began, self._depth = time.monotonic(), self._depth + 1
        try:
            return (yield)
        finally:
            self._depth -= 1
            if not self._depth:
                self._own -= time.monotonic() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            report.outcome, report.longrepr = "failed", f"skipped: {report.longreprtext}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            self._own += report.duration
        self._has_failed |= not report.passed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._own, self._has_failed = 0.0, False
        result = yield
        if any(item.get_closest_marker(name) for name in ("trial", "slow")):
            return result
        times = [self._own]
        while min(times) > _MOST_SECONDS and len(times) < _MEASUREMENTS and not self._has_failed:
            self._own = 0.0
            item._initrequest()  # type: ignore[attr-defined]
            for report in runtestprotocol(item, log=False, nextitem=nextitem):
                self._own += report.duration if report.when != "teardown" else 0.0
                if not report.passed:
                    self._has_failed = True
                    item.ihook.pytest_runtest_logreport(report=report)
            times.append(self._own)
        if min(times) > _MOST_SECONDS and not self._has_failed:
            item.ihook.pytest_runtest_logreport(report=_too_slow(item, times))
        return result


def _too_slow(item: pytest.Item, times: list[float]) -> pytest.TestReport:
    measured = ", ".join(f"{one:.1f}" for one in times)
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"takes {measured} s, and not {_FAST_SECONDS:g}: make it faster, or mark it `trial`, or `slow` with the reason",
        when="call",
    )
