"""Threads for work on foreign input, which leave the processor to the event loop."""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 5  # above the process's: a third of the event loop's share of a core, where both want it
_MOST = 19


def background_threads(name: str, threads: int) -> ThreadPoolExecutor:
    """A pool whose work gives way to the process's event loop, and to those of other processes.

    One team's long texts may occupy all of its threads. At the same priority these would take most of a
    small machine from the requests of others.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_give_way)


def _give_way() -> None:
    if sys.platform != "linux":  # elsewhere a niceness is of the whole process
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a container may forbid it
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, _MOST))
