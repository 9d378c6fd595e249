"""Threads that the engine may start in this process: it ends the process when one is refused."""

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

from app.core.errors import IndexUnavailableError

_CGROUPS = Path("/sys/fs/cgroup")
# The limits of the container (control groups of either version) and of the machine.
_LIMIT_FILES = (
    _CGROUPS / "pids.max",
    _CGROUPS / "pids/pids.max",
    Path("/proc/sys/kernel/threads-max"),
)
_UNKNOWN_LIMIT = 256


def engine_thread_limit(files: tuple[Path, ...] = _LIMIT_FILES) -> int:
    """Half of the threads that this container, user and machine allow; the rest is the process's."""
    user_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [] if user_limit == resource.RLIM_INFINITY else [user_limit]
    for file in files:
        with contextlib.suppress(OSError):
            if (text := file.read_text().strip()).isdigit():
                limits.append(int(text))
    return min(limits, default=_UNKNOWN_LIMIT) // 2


class ThreadBudget:
    """Threads of all queries that run; a query waits until those that it may need are free."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = engine_thread_limit() if limit is None else limit
        self._used = 0
        self._freed = threading.Condition()

    @contextlib.contextmanager
    def take(self, threads: int) -> Iterator[None]:
        """Reserve threads; blocks. Raises IndexUnavailableError if there are never so many."""
        if threads > self.limit:
            raise IndexUnavailableError(
                f"This query needs up to {threads:,} threads, and the server may start {self.limit:,} for "
                "queries. Use fewer clauses and terms; its operator can raise the container's limit."
            )
        with self._freed:
            self._freed.wait_for(lambda: self._used + threads <= self.limit)
            self._used += threads
        try:
            yield
        finally:
            with self._freed:
                self._used -= threads
                self._freed.notify_all()
