"""A mutant in a process that imports the service again: for constants and decorated functions."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tools.mutation.forks import run_fork
from tools.mutation.mutants import Mutant

_PRELOADED = (
    "alembic.command", "asyncpg", "fastapi", "grpc.aio", "httpx", "jinja2", "jsonschema", "numpy",
    "prometheus_client", "psutil", "pydantic_settings", "sqlalchemy", "starlette.middleware",
    "tokenizers", "tritonclient.grpc.aio", "uvicorn", "uvloop",
)  # fmt: skip
PYTEST = (
    *("-x", "-q", "-n", "0", "--no-header", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what is imported before
)


class ColdRunner:
    """Forks a process that has all third-party imports, and none of the service's."""

    def __init__(self, root: Path, log: Path) -> None:
        self._root, self._log = root, log
        for name in _PRELOADED:
            importlib.import_module(name)

    def run(
        self, mutant: Mutant | None, tests: Sequence[str], seconds: float
    ) -> tuple[int | None, str]:
        """Return the exit status of pytest, None after `seconds`, and the test that failed first."""
        order = Order(tests)

        def work(failed: int) -> int:
            os.chdir(self._root)
            order.failed = failed
            if mutant:
                _forget({mutant.module.partition(".")[0], "tests"})
                sys.meta_path.insert(0, _MutantFinder(self._root, mutant))
            try:
                return int(pytest.main([*PYTEST, *order.files()], plugins=[order]))
            except pytest.PytestUnraisableExceptionWarning:
                # A socket that is left open is an error of the run, also after its last test.
                return int(pytest.ExitCode.TESTS_FAILED)

        return run_fork(work, self._log, seconds)


def _forget(packages: set[str]) -> None:
    """Drop modules that this command has imported for its own use, to be imported again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


class Order:
    """A pytest plugin: these tests, in this order, and the name of the first that fails."""

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: place for place, name in enumerate(names)}
        self.failed = -1  # a file descriptor

    def files(self) -> list[str]:
        return list(dict.fromkeys(name.partition("::")[0] for name in self._place))

    def choose(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        def place(item: pytest.Item) -> int:
            file = item.nodeid.partition("::")[0]
            return self._place.get(item.nodeid, self._place.get(file, -1))

        return sorted((item for item in items if place(item) >= 0), key=place)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = self.choose(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.failed, report.nodeid.encode())


class _MutantFinder(importlib.abc.MetaPathFinder):
    """Finds the mutant's module, and nothing else."""

    def __init__(self, root: Path, mutant: Mutant) -> None:
        self._file = root / mutant.path
        self._name = mutant.module
        self._text = mutant.apply(root)

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        loader = _MutantLoader(name, str(self._file))
        loader.text = self._text
        return importlib.util.spec_from_file_location(name, self._file, loader=loader)


class _MutantLoader(importlib.machinery.SourceFileLoader):
    text = b""

    def get_code(self, _name: str, /) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)
