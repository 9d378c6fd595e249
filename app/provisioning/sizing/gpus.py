"""GPUs, and the memory of each that a process can have.

`memory` is CUDA's figure (`cudaMemGetInfo`: "total capacity" in PyTorch's messages), which is less
than the nominal size: the driver and, on some cards, error correction take their part. Drivers differ
by tenths of a GiB; the smallest observed value is used. Compute capabilities are from
https://developer.nvidia.com/cuda-gpus.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.provisioning.sizing.facts import GIB, PlanError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model of GPU: `memory` in bytes, `capability` as CUDA counts it."""

    name: str
    title: str
    memory: int
    capability: tuple[int, int]

    @property
    def has_bfloat16(self) -> bool:
        """Ampere and later compute with it; vLLM refuses it on older ones."""
        return self.capability >= (8, 0)


GPUS: Mapping[str, Gpu] = {
    name: Gpu(name, title, int(gib * GIB), capability)
    for name, title, gib, capability in (
        ("t4-16", "T4", 14.56, (7, 5)),
        ("v100-16", "V100 16 GB", 15.77, (7, 0)),
        ("v100-32", "V100 32 GB", 31.73, (7, 0)),
        ("a10-24", "A10 and A10G", 22.05, (8, 6)),
        ("l4-24", "L4", 22.03, (8, 9)),
        ("rtx3090-24", "GeForce RTX 3090", 23.55, (8, 6)),
        ("rtx4090-24", "GeForce RTX 4090", 23.52, (8, 9)),
        ("rtx5090-32", "GeForce RTX 5090", 31.36, (12, 0)),
        ("a40-48", "A40", 44.34, (8, 6)),
        ("l40s-48", "L40S", 44.39, (8, 9)),
        ("a6000-48", "RTX A6000", 47.40, (8, 6)),
        ("a100-40", "A100 40 GB", 39.38, (8, 0)),
        ("a100-80", "A100 80 GB", 79.14, (8, 0)),
        ("h100-80", "H100 80 GB", 79.10, (9, 0)),
        ("h200-141", "H200", 139.72, (9, 0)),
        ("b200-180", "B200", 178.35, (10, 0)),
    )
}


def find_gpus(name: str) -> list[Gpu]:
    """The GPU of this name; or of this name with any memory, in GB behind it. Raises PlanError."""
    wanted = name.lower()
    if wanted in GPUS:
        return [GPUS[wanted]]
    found = [gpu for gpu in GPUS.values() if gpu.name.startswith(f"{wanted}-")]
    if not found:
        raise PlanError(f"{name[:40]!r} is not a known GPU: there are {', '.join(GPUS)}")
    return found
