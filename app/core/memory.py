"""Available memory of the machine."""

import contextlib
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory() -> int:
    """Available bytes of the machine, or of the control group if it has fewer."""
    figures = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(figures["MemAvailable"].split()[0]) * 1024
    for limit_file in map(Path, _CGROUP_LIMITS):
        with contextlib.suppress(OSError):
            if (limit := limit_file.read_text().strip()).isdigit():
                available = min(available, int(limit))
    return available
