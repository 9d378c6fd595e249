"""The suite's own rules: a hang or a death ends the run and is named, a slow test fails, shards take turns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shards import SHARDS, select

ROOT = Path(__file__).resolve().parents[3]
_PASSES = "def test_passes():\n    pass\n\n"
_SLOW_SERVER = """
import pytest, time

@pytest.fixture(scope="module")
def server():
    time.sleep(0.2)

"""
_LIMITS = """
import tests.tiers

tests.tiers._MOST_SECONDS = 0.05
"""


def run(tests: Path, *options: str) -> str:
    """Run the tests in two processes and return what pytest prints."""
    plugins = ["xdist", "pytest_timeout", "tests.hangs", "tests.scheduling", "tests.tiers"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--max-worker-restart", "0", *options,
         *(word for name in plugins for word in ("-p", name)),
         "--rootdir", str(tests), "-c", "/dev/null", str(tests)],
        cwd=ROOT, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they take seconds to import
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def write(directory: Path, **files: str) -> None:
    for name, text in files.items():
        directory.joinpath(f"{name}.py").write_text(text)


@pytest.mark.parametrize(
    ("fault", "shown"),
    [("while True: pass", 'test_b.py", line 3, in test_faulty'), ("os._exit(1)", "")],
    ids=["hangs", "dies"],
)
@pytest.mark.trial
@pytest.mark.shard("tools")
def test_the_run_ends_with_the_name_of_a_test_that(tmp_path: Path, fault: str, shown: str) -> None:
    faulty = f"import os\ndef test_faulty():\n    {fault}\n\n"
    others = {f"test_{name}": _PASSES for name in "cdefgh"}
    write(tmp_path, test_a=_PASSES, test_b=faulty + _PASSES, **others)
    printed = run(tmp_path, "--timeout", "3", "-o", "timeout_method=thread")
    assert "crashed while running 'test_b.py::test_faulty'" in printed
    assert "worker restarting disabled" in printed
    assert "1 failed" in printed
    assert shown in printed


@pytest.mark.trial
@pytest.mark.shard("tools")
def test_a_test_that_is_slow_each_time_fails(tmp_path: Path) -> None:
    once = "    if not ran:\n        ran.append(1)\n        time.sleep(0.1)\n"
    write(
        tmp_path,
        conftest=_LIMITS,
        test_a=_SLOW_SERVER + "def test_own(server):\n    time.sleep(0.1)\n",
        test_b=_SLOW_SERVER + "def test_shared(server):\n    pass\n",
        test_c="import time\nran = []\ndef test_once():\n" + once,
        test_d="import pytest, time\n@pytest.mark.slow('x')\ndef test_marked():\n    time.sleep(0.1)\n",
    )
    printed = run(tmp_path, "--strict-tiers", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    assert "1 failed, 4 passed" in printed  # what is slow has passed before
    assert re.search(r"test_own _+\n.*\ntakes 0.1, 0.1, 0.1 s, and not 2: make it faster", printed)


def test_shards_run_when_their_paths_change_and_by_turns() -> None:
    assert [list(select([], f"{turn:x}")) for turn in range(len(SHARDS))] == [
        [name] for name in SHARDS
    ]
    assert select(["tests/chaos/history.py"], "0") == {
        "partitions": "tests/chaos/history.py changed", "failover": "tests/chaos/history.py changed"
    }  # fmt: skip
    assert select(["nvidia_triton/x", "README.md"], "0") == {
        "partitions": "its turn", "vast": "nvidia_triton/x changed", "docs": "README.md changed"
    }  # fmt: skip
    assert list(select(["db/versions/0001.py"], "0")) == list(SHARDS)
