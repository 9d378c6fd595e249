"""A test that hangs: where its main thread is and where its tasks wait, on the standard error of the whole run.

pytest-timeout ends the process then. Its own report has no reader in a process of xdist, and names no coroutine.
"""

import asyncio
import os
import sys
import threading
import traceback
from asyncio import tasks
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from pytest_timeout import Settings

_BEFORE_THE_END = 0.5  # s
_TIMER = pytest.StashKey[threading.Timer]()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    seconds = max(0.0, settings.timeout - _BEFORE_THE_END)
    timer = threading.Timer(
        seconds, _report, [item, item.config.stash[fault_handler_stderr_fd_key]]
    )
    timer.daemon = True
    timer.start()
    item.stash[_TIMER] = timer


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    if _TIMER in item.stash:
        item.stash[_TIMER].cancel()


def _report(item: pytest.Item, stderr: int) -> None:
    main = sys._current_frames()[threading.main_thread().ident or 0]
    # Tasks of all loops: `asyncio.all_tasks` has those of one, which is unknown here.
    found = getattr(tasks, "_scheduled_tasks", None) or vars(tasks)["_all_tasks"]  # Python 3.11
    waiting = "\n".join(f"  {name}" for name in sorted(places_of(set(found))))
    stack = "".join(traceback.format_stack(main))
    os.write(stderr, f"\n{item.nodeid} hangs\n{stack}Tasks:\n{waiting}\n".encode())


def places_of(found: set[asyncio.Task[Any]]) -> list[str]:
    """Return where each task waits: its name, and the lines of the coroutines that wait for one another."""
    return [f"{task.get_name()}: {' > '.join(_lines(task))}" for task in found if not task.done()]


def _lines(task: asyncio.Task[Any]) -> Iterator[str]:
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        waiting = waiting.cr_await
