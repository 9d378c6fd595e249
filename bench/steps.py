"""Steps of a process that another one measures: each begins by a line on stdin.

It needs the standard library alone, so that it also runs in the environment of the peers.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence


async def run_steps(steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run one step a line of input; print the seconds and own CPU seconds of each as JSON."""
    loop = asyncio.get_running_loop()
    for step in steps:
        if not await loop.run_in_executor(None, sys.stdin.readline):
            return
        began, before = time.perf_counter(), _cpu_seconds()
        await step()
        measured = {"seconds": time.perf_counter() - began, "cpu": _cpu_seconds() - before}
        print(json.dumps(measured), flush=True)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
