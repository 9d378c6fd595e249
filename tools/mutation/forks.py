"""Forked processes that run tests: their time limit, their output, and their end."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

BROKEN = 70  # the exit status of a process whose own code, not a test, failed


def run_fork(work: Callable[[int], int], log: Path, seconds: float) -> tuple[int | None, str]:
    """Run `work` in a fork; return the exit status that it returned, and what it wrote.

    `work` takes a file descriptor to write to. After `seconds` the process and all that it started
    are killed, and the status is None.
    """
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        _be_child(work, write, log)
    os.close(write)
    try:
        status = _wait(process, seconds)
        with os.fdopen(read) as pipe:
            return status, pipe.read()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)  # what its tests started


def _be_child(work: Callable[[int], int], write: int, log: Path) -> NoReturn:
    status = BROKEN
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = work(write)
    except BaseException:  # noqa: BLE001 - nothing of the parent may run here
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _wait(process: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None
