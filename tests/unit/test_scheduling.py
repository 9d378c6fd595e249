"""A test process that dies costs the test that it ran, and no other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_TESTS = "import os\nimport subprocess\nimport time\nfrom pathlib import Path\n\nimport psutil\n\n{tests}"
_PASSES = "def test_{n}():\n    pass\n\n"
_DIES = "def test_{n}():\n    os._exit(1)\n\n"
_WAITS = """
def test_{n}():
    Path(__file__).with_name("waits").touch()
    time.sleep(60)

"""
_KILLS_ALL = """
def test_{n}():
    while not Path(__file__).with_name("waits").exists():
        time.sleep(0.01)
    processes = psutil.Process().parent().children()
    subprocess.run(["kill", "-KILL", *(str(one.pid) for one in processes)])

"""

# Loaded by the controlling process: a command reaches a process that has died since it was chosen.
_SLOW_COMMANDS = """
import time

from xdist.workermanage import WorkerController

send = WorkerController.sendcommand


def send_late(self, *arguments, **named):
    time.sleep(0.2)
    send(self, *arguments, **named)


WorkerController.sendcommand = send_late
"""


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
    assert re.search(r"2 failed, 10 passed", _run(tmp_path, processes))


def test_processes_may_die_at_once(tmp_path: Path) -> None:
    """The scheduler learns of one death while it hands that process's files to the other."""
    tmp_path.joinpath("conftest.py").write_text(_SLOW_COMMANDS)
    _file(tmp_path, "a", _KILLS_ALL, _PASSES)
    _file(tmp_path, "b", _WAITS, _PASSES)
    for name in "cdefgh":
        _file(tmp_path, name, _PASSES)
    assert re.search(r"2 failed, 8 passed", _run(tmp_path, 2))


def _run(tests: Path, processes: int) -> str:
    """Run the tests in so many processes and return what pytest prints."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.scheduling", "-n", str(processes)]
    options = ["--rootdir", str(tests), "-c", "/dev/null", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *options, str(tests)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return ended.stdout + ended.stderr
