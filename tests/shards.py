"""Shards of `make trial`: tests that wait long for one part each, and seldom find a change elsewhere.

A test with the mark `shard` and a name of `SHARDS` runs if its paths changed within a day's work, if it is the shard's
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
# Each with the paths whose change runs it.
SHARDS: Mapping[str, str] = {
    "partitions": "app/core/* app/queue/* app/worker/* tests/chaos/*",
    "failover": "app/core/* app/queue/* tests/chaos/*",
    "slurm": "app/provisioning/* app/inference/server* triton/* tests/*slurm* tests/*launch*",
    "vast": "app/provisioning/* nvidia_triton/* triton/* tests/*vast* tests/ssh_server.py",
    "containers": "Dockerfile docker-compose* .docker* .env* proxy/* app/cli/* app/core/settings/* docs/backup.md"
    " docs/compose.md tests/docker_engine.py tests/integration/deployment/*",
    "tools": "tools/* tests/scheduling.py tests/tiers.py tests/hangs.py pyproject.toml .secrets.baseline",
    "docs": "docs/* *.md app/*/schemas.py",
}
# Their change runs all shards.
EVERYWHERE = (
    "requirements*.txt triton/requirements* db/* .ci/* Makefile tests/conftest.py tests/shards.py"
)
_SINCE = "8 hours ago"  # a day's work


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
        (base, *_) = _git("rev-list", f"--before={_SINCE}", "--max-count=1", "HEAD").split()
        changed = _git("diff", "--name-only", base).splitlines()
        tree = _git("rev-parse", "HEAD^{tree}")
    except (OSError, ValueError, subprocess.CalledProcessError):
        return dict.fromkeys(SHARDS, "no git history decides")
    return select(changed, tree)


def select(changed: Sequence[str], tree: str) -> dict[str, str]:
    """Those whose paths changed, and the one whose turn the hash `tree` decides."""
    chosen = {}
    turn = int(tree, 16) % len(SHARDS)
    for place, (name, paths) in enumerate(SHARDS.items()):
        patterns = f"{EVERYWHERE} {paths}".split()
        file = next((one for one in changed if any(fnmatch(one, each) for each in patterns)), None)
        if file is not None:
            chosen[name] = f"{file} changed"
        elif place == turn:
            chosen[name] = "its turn"
    return chosen


def _git(*words: str) -> str:
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return ran.stdout.strip()
