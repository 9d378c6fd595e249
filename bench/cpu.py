"""What processes cost, from /proc: CPU time of whole trees, and proportional memory."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.load import Load


def tree_seconds(pid: int) -> float:
    """User and system seconds of a process, its living descendants, and those they waited for."""
    root = psutil.Process(pid)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def exact_seconds(pid: int) -> float:
    """The same to the microsecond, of processes of one thread each that live on: PostgreSQL's."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0])
    return total / 1e9


def pss_kilobytes(pid: int) -> int:
    """Memory of one process in kB; pages shared with others count in proportion."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise RuntimeError(f"process {pid} tells no Pss")


@dataclass(slots=True, frozen=True)
class Sample:
    """A stretch of load: what it did, and the CPU seconds each part spent meanwhile."""

    load: Load
    cpu: dict[str, float]

    def microseconds(self, *parts: str) -> float:
        """CPU time per operation of these parts together."""
        return sum(self.cpu[part] for part in parts) / self.load.count * 1e6


async def measure(parts: Mapping[str, int], work: Awaitable[Load]) -> Sample:
    """Run `work` and charge it with the CPU time of the process trees in `parts`."""
    before = {part: tree_seconds(pid) for part, pid in parts.items()}
    load = await work
    after = {part: tree_seconds(pid) for part, pid in parts.items()}
    return Sample(load, {part: after[part] - before[part] for part in parts})


async def cores_in_use(seconds: float) -> float:
    """How many cores the rest of the machine keeps busy: told beside every run."""
    before, began = busy_seconds(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (busy_seconds() - before) / (time.perf_counter() - began)


def busy_seconds() -> float:
    """Seconds that the machine's cores were busy so far, all programs and what the host took."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.softirq + times.steal)
