"""A mutant in a fork of a process that has imported and collected all tests."""

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.main import pytest_runtestloop as run_tests

from tools.mutation.cold import PYTEST, Order
from tools.mutation.forks import run_fork
from tools.mutation.mutants import Mutant
from tools.mutation.patching import patch
from tools.mutation.uses import Uses

UNPATCHED = 71  # the exit status if the mutant needs a new import
_Result = tuple[int | None, str]


class WarmRunner:
    """A pytest session that waits, with its tests collected, and forks for each mutant."""

    def __init__(self, root: Path, arguments: Sequence[str], log: Path) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(root, arguments, log, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def run(self, mutant: Mutant | None, tests: Sequence[str], seconds: float) -> _Result:
        """Return as `ColdRunner.run`, or `UNPATCHED`; raises EOFError if the session has ended."""
        self._connection.send((mutant, tests, seconds))
        result: _Result = self._connection.recv()
        return result


class _Session:
    """A pytest plugin that runs no test itself."""

    def __init__(
        self, root: Path, log: Path, connection: "multiprocessing.connection.Connection"
    ) -> None:
        self._root, self._log, self._connection = root, log, connection
        self._order: Order | None = None
        self._uses = Uses(root, "app")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while True:
            try:
                mutant, tests, seconds = self._connection.recv()
            except EOFError:
                return True
            work = functools.partial(self._run, session, mutant, tests)
            self._connection.send(run_fork(work, self._log, seconds))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._order:
            self._order.pytest_runtest_logreport(report)

    def _run(
        self, session: pytest.Session, mutant: Mutant | None, tests: Sequence[str], failed: int
    ) -> int:
        if mutant and not patch(self._root, mutant, self._uses):
            return UNPATCHED
        self._order = Order(tests)
        self._order.failed = failed
        session.items = self._order.choose(session.items)
        if not session.items:
            return int(pytest.ExitCode.NO_TESTS_COLLECTED)
        with contextlib.suppress(session.Failed):
            run_tests(session)
        return int(bool(session.testsfailed))


def _serve(
    root: Path,
    arguments: Sequence[str],
    log: Path,
    connection: "multiprocessing.connection.Connection",
) -> None:
    output = os.open(log.with_suffix(".session.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    pytest.main([*PYTEST, *arguments], plugins=[_Session(root, log, connection)])
