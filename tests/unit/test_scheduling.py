"""A test process that dies costs the test that it ran, and no other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_TESTS = "import os\n\n{tests}"
_PASSES = "def test_{n}():\n    pass\n\n"
_DIES = "def test_{n}():\n    os._exit(1)\n\n"


def _file(directory: Path, name: str, *tests: str) -> None:
    text = "".join(test.format(n=n) for n, test in enumerate(tests))
    directory.joinpath(f"test_{name}.py").write_text(_TESTS.format(tests=text))


# A session of its own, with processes of its own: 2 to 4 s.
@pytest.mark.parametrize("processes", [1, 2])
def test_what_follows_a_death_runs_elsewhere(tmp_path: Path, processes: int) -> None:
    _file(tmp_path, "a", _PASSES, _PASSES)
    _file(tmp_path, "b", _PASSES, _DIES, _PASSES, _PASSES)
    _file(tmp_path, "c", _DIES)
    for name in "defgh":
        _file(tmp_path, name, _PASSES)
    command = [sys.executable, "-m", "pytest", "-p", "tests.scheduling", "-n", str(processes)]
    ended = subprocess.run(
        [
            *command,
            "--rootdir",
            str(tmp_path),
            "-c",
            "/dev/null",
            "-p",
            "no:cacheprovider",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert re.search(r"2 failed, 10 passed", ended.stdout), ended.stdout + ended.stderr
