"""A limit on a process's memory, like that of a container, and its highest memory so far."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_KIB = 1024


def resident_bytes(pid: int, figure: str = "VmHWM") -> int:
    """The highest resident memory of a process; `VmRSS`: its present one."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * _KIB for line in lines if line.startswith(figure))


@contextlib.contextmanager
def limited(name: str, pid: int, limit: int) -> Iterator[str]:
    """Limit a running process by a control group, or else its data segment; yields which.

    A group counts what the process takes from then on, so it gets what the limit leaves.
    """
    left = limit - resident_bytes(pid, "VmRSS")
    for parent, file in (
        (_GROUPS / "memory", "memory.limit_in_bytes"),
        (_GROUPS, "memory.max"),
    ):
        group = parent / f"{name}-{pid}"
        try:
            group.mkdir()
            (group / file).write_text(str(left))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield f"control group {group}"
        finally:
            with contextlib.suppress(OSError):  # the process has ended
                (parent / "cgroup.procs").write_text(str(pid))
            with contextlib.suppress(OSError):  # the kernel is behind
                group.rmdir()
        return
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    yield "RLIMIT_DATA (no control group can be made here)"
