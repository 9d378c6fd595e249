"""A test that hangs: the stack of each thread, on the standard error of the whole run.

pytest-timeout ends the process then, and prints the stacks where a process of xdist has no reader.
"""

import faulthandler

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from pytest_timeout import Settings

_BEFORE_THE_END = 0.5  # s


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    if settings.timeout > _BEFORE_THE_END:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(settings.timeout - _BEFORE_THE_END, file=stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> None:
    faulthandler.cancel_dump_traceback_later()
