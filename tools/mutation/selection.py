"""The tests that run a mutant's code, the likely ones first: from one run of them with coverage."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from coverage import CoverageData

from tests.servers import VARIABLE
from tools.mutation.mutants import Mutant
from tools.mutation.servers import start_servers
from tools.mutation.uses import Uses

# Tests of these folders need no server but PostgreSQL and Triton, and run in one process.
TIERS = ("tests/unit", "tests/integration", "tests/security")
_LEFT_OUT = ("cli", "deployment", "ui", "nvidia_triton", "bench", "repository")
COLLECTED = (
    *("-m", "not trial and not slow"),
    *(f"--ignore={tier}/{room}" for tier in TIERS for room in _LEFT_OUT),
    *TIERS,
)
_FILE_SECONDS = 5.0  # of a file that was not recorded
_PLUGIN = "tools.mutation.durations"


@dataclass(frozen=True)
class Test:
    name: str
    seconds: float


class Selection:
    """Recorded run: the tests of each line, and the duration of each test."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._seconds: dict[str, float] = json.loads((directory / "durations.json").read_text())
        self._data = CoverageData(str(directory / "coverage"))
        self._data.read()
        if not any(Path(file).is_relative_to(root) for file in self._data.measured_files()):
            raise SystemExit(f"{directory} was recorded in another folder; --record records again")
        self._root = root
        self._uses = Uses(root, "app")
        self._by_line: dict[str, Mapping[int, Sequence[str]]] = {}

    def tests(self, mutant: Mutant) -> list[Test]:
        """Return the tests of a mutant: those of its module first, then short before long."""
        lines = [(mutant.path, line) for line in mutant.lines]
        names = self._tests_of(lines)
        if not names:  # run at the import alone: the tests of what uses it
            names = self._tests_of(self._uses.lines(mutant.path, mutant.scope.partition(".")[0]))
        found = [Test(name, self._seconds[name]) for name in names if name in self._seconds]
        return sorted(found, key=lambda test: (_distance(mutant, test.name), test.seconds))

    def _tests_of(self, lines: Iterable[tuple[str, int]]) -> set[str]:
        return {
            context.rpartition("|")[0]
            for path, line in lines
            for context in self._contexts(path).get(line, ())
            if context
        }

    def _contexts(self, path: str) -> Mapping[int, Sequence[str]]:
        if path not in self._by_line:
            self._by_line[path] = self._data.contexts_by_lineno(str(self._root / path))
        return self._by_line[path]


def record(root: Path, directory: Path, jobs: int) -> None:
    """Run the tests once with coverage by test; raises CalledProcessError if it could not begin."""
    with start_servers(root, jobs) as servers:
        arguments = [
            *("-q", "-n", str(jobs), "--dist", "loadfile"),
            *("-p", "no:cacheprovider", "-p", _PLUGIN),
            *("--cov=app", "--cov-context=test", "--cov-report="),
            *COLLECTED,
        ]
        environment = os.environ | {
            "COVERAGE_FILE": str(directory / "coverage"),
            "MUTATION_DURATIONS": str(directory / "durations.json"),
            VARIABLE: json.dumps(servers),
        }
        command = [sys.executable, "-m", "pytest", *arguments]
        status = subprocess.run(command, cwd=root, env=environment, check=False).returncode  # noqa: S603
        if status not in (0, 1):
            raise subprocess.CalledProcessError(status, command)


def named_tests(root: Path, names: Iterable[str]) -> list[Test]:
    """Return the files of these names, and those in the folders among them."""
    files = [file for name in names for file in _test_files(root / name)]
    return [Test(str(file.relative_to(root)), _FILE_SECONDS) for file in files]


def mirrored_tests(root: Path, mutant: Mutant) -> list[Test]:
    """Return a room's test files, the module's own first, where no run was recorded."""
    room, module = PurePath(mutant.path).parts[1], PurePath(mutant.path).stem
    folders = [root / tier / room for tier in TIERS if (root / tier / room).is_dir()]
    files = [file for folder in folders for file in _test_files(folder)]
    files.sort(key=lambda file: module not in file.stem)
    return named_tests(root, [str(file.relative_to(root)) for file in files])


def _test_files(place: Path) -> list[Path]:
    return sorted(place.rglob("test_*.py")) if place.is_dir() else [place]


def _distance(mutant: Mutant, test: str) -> int:
    """0: the module's own tests, 1: its room's, 2: others."""
    room, module = PurePath(mutant.path).parts[1], PurePath(mutant.path).stem
    parts = PurePath(test.partition("::")[0]).parts
    if room not in parts:
        return 2
    return 0 if module in parts[-1] else 1
