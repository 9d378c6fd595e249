"""Resources to request from a scheduler such as Slurm: GPUs, cores, host memory, time."""

import math
from dataclasses import dataclass

MAX_NODES = 64  # of a server


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one server, on each of its `nodes`.

    `memory_gb`: host memory (10^9 bytes); `minutes`: with the loading.
    """

    nodes: int
    gpus: int
    gres: str
    cpu_cores: int
    memory_gb: int
    minutes: int


def resources_for(disk_bytes: int, gpus: int, serve_minutes: int, nodes: int = 1) -> Resources:
    """Resources of a server that reads these weights (bytes on disk) and serves for so long.

    Cores: two for each of vLLM's processes (one a GPU, the engine's, the server's). Memory: 8 GB, 4
    for each GPU's process, and the node's part of the weights once, so that all of these read them from
    the disk's cache. Time: the requested time, 3 minutes for the start, and the weights at 0.5 GB/s, as
    nodes share the disk.
    """
    gigabytes = disk_bytes / 1e9
    start_minutes = 3 + gigabytes / 0.5 / 60
    return Resources(
        nodes=nodes,
        gpus=gpus,
        gres=f"gpu:{gpus}",
        cpu_cores=2 * (gpus + 2),
        memory_gb=_round_up(8 + 4 * gpus + gigabytes / nodes, 8),
        minutes=_round_up(serve_minutes + start_minutes, 10),
    )


def _round_up(value: float, step: int) -> int:
    return math.ceil(value / step) * step
