"""Shards of `make trial`: tests that wait long for one part each, and seldom find a change elsewhere.

A test with the mark `shard` and a name of `SHARDS` runs if its paths changed within a day, if it is the shard's
turn, which the revision decides, or if `ALL=1`. The report ends with the names that ran and those that did not.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

# `make trial` sets it; pytest alone runs what it is given.
VARIABLE = "TRIAL_SHARDS"
SHARDS: Mapping[str, Sequence[str]] = {
    "partitions": ("app/core/*", "app/queue/*", "app/worker/*", "tests/chaos/*"),
    "failover": ("app/core/*", "app/queue/*", "tests/chaos/*"),
    "slurm": ("app/provisioning/*", "app/inference/server*", "triton/*", "tests/*slurm*"),
    "tools": (
        "tools/*",
        "tests/scheduling.py",
        "tests/tiers.py",
        "pyproject.toml",
        ".secrets.baseline",
    ),
    "docs": ("docs/*", "*.md", "app/*/schemas.py"),
    "vast": (
        "app/provisioning/*",
        "nvidia_triton/*",
        "triton/*",
        "tests/*vast*",
        "tests/ssh_server.py",
    ),
}
# Their change runs all shards.
EVERYWHERE = (
    *("requirements*.txt", "triton/requirements*", "db/*", ".ci/*", "Makefile", "tests/conftest.py"),
    "tests/shards.py",
)  # fmt: skip
_SINCE = "24 hours ago"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if VARIABLE in os.environ:
        chosen = choose_shards()
        for name in SHARDS:
            terminalreporter.write_line(
                f"shard {name}: {chosen.get(name, 'not run (ALL=1 runs all)')}"
            )


@pytest.hookimpl(trylast=True)  # behind `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if VARIABLE not in os.environ:
        return
    left = [item for item in items if (name := _shard(item)) and name not in choose_shards()]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def _shard(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("shard")
    return mark.args[0] if mark else None


@cache
def choose_shards() -> dict[str, str]:
    """The shards of this revision, and the reason of each."""
    if os.environ.get("ALL") == "1":
        return dict.fromkeys(SHARDS, "ALL=1")
    try:
        base = _git("rev-list", "-1", f"--before={_SINCE}", "HEAD") or _git(
            "rev-list", "--max-parents=0", "HEAD"
        )
        changed = _git("diff", "--name-only", base.split()[-1]).splitlines()
        tree = _git("rev-parse", "HEAD^{tree}")
    except (OSError, subprocess.CalledProcessError):
        return dict.fromkeys(SHARDS, "no git history decides")
    return select(changed, tree)


def select(changed: Sequence[str], tree: str) -> dict[str, str]:
    """Those whose paths changed, and the one whose turn the hash `tree` decides."""
    chosen = {}
    turn = int(tree, 16) % len(SHARDS)
    for place, (name, paths) in enumerate(SHARDS.items()):
        file = next(
            (one for one in changed if any(fnmatch(one, path) for path in (*EVERYWHERE, *paths))),
            None,
        )
        if file is not None:
            chosen[name] = f"{file} changed"
        elif place == turn:
            chosen[name] = "its turn"
    return chosen


def _git(*words: str) -> str:
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return ran.stdout.strip()
