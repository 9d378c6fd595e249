"""Detection of processes without activity: neither CPU time nor disk transfers.

A vLLM model's load takes from seconds to many minutes, depending on its size, the disk and
compilation, so a bound on its duration is either too short or useless. The processes of a load that
hangs do nothing.
"""

import contextlib
import time

import psutil

from app.cli.up import processes

# A server that waits uses 0.0003 cores, one with a loaded and idle vLLM engine 0.02; both
# transfer nothing (measured). A load reads, compiles or computes, if only at times.
CORES = 0.05
BYTES_PER_SECOND = 32_768


class Activity:
    """Watches one process and all its descendants, from `look` to `look`."""

    def __init__(self, pid: int, look_seconds: float) -> None:
        """`look_seconds`: the intended time between two looks."""
        self._pid = pid
        self._look_seconds = look_seconds
        self._counts = self._read()
        self._looked = time.monotonic()
        self._still = 0.0

    def look(self) -> float:
        """Seconds without activity until now.

        A late look counts as one interval: then this process was suspended as well, and the others
        may have been so for the same reason.
        """
        now = time.monotonic()
        seconds = now - self._looked
        before, self._counts, self._looked = self._counts, self._read(), now
        used = transferred = 0.0
        for pid, (cpu, transfers) in self._counts.items():
            cpu_before, transfers_before = before.get(pid, (0.0, 0))
            used += max(0.0, cpu - cpu_before)
            transferred += max(0, transfers - transfers_before)
        if used >= CORES * seconds or transferred >= BYTES_PER_SECOND * seconds:
            self._still = 0.0
        else:
            self._still += min(seconds, self._look_seconds)
        return self._still

    def _read(self) -> dict[int, tuple[float, int]]:
        counts = {}
        for process in processes.family(self._pid):
            with contextlib.suppress(psutil.Error), process.oneshot():  # it has ended
                cpu, transfers = process.cpu_times(), process.io_counters()
                counts[process.pid] = (
                    cpu.user + cpu.system,
                    transfers.read_bytes + transfers.write_bytes,
                )
        return counts
