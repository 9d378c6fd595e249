"""Starts the servers that the tests of all mutants share."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def start_servers(root: Path, count: int) -> Iterator[list[dict[str, Any]]]:
    """Start `count` pairs of PostgreSQL and Triton; each is described as in tests/servers.py."""
    command = [sys.executable, "-m", "tests.servers"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
            )
            for _ in range(count)
        ]
        yield [json.loads(process.stdout.readline()) for process in processes if process.stdout]
