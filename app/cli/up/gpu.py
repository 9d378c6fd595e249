"""NVIDIA GPUs of this machine, as the driver reports them: a module of `up`, a script for make.

    python3 -I gpu.py ""|0|1     print `gpu` or `cpu`; status 1 and the reason where 1 is impossible

The script runs before anything is installed, so it uses the standard library only. A child process
calls the driver, with a deadline, because a broken driver can hang or crash its caller.

CUDA driver API: https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
# CUDA of the wheels in triton/requirements-gpu.txt. Every 13.x runs on a driver of 13.0.
CUDA = (13, 0)
DRIVER = 580  # first NVIDIA driver with that CUDA
CAPABILITY = (7, 5)  # least compute capability that those wheels hold kernels for
PROBE_SECONDS = 20.0
# Values of the enumerations CUdevice_attribute and CUresult.
_MAJOR, _MINOR = 75, 76
_NO_DEVICE = 100
_NAME_BYTES = 256
_OPTIONAL = "set GPU=0 (`up --no-gpu`) to run on the CPU."


class GpuError(Exception):
    """No usable GPU; the message is one line with the reason and the remedy."""


class NoGpuError(GpuError):
    """Neither a driver nor a device: an ordinary machine without a GPU."""


@dataclass(frozen=True)
class Gpu:
    """One device: its marketing name, memory in bytes and compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


def choose(wanted: str, library: str = LIBRARY) -> tuple[str, str]:
    """Return `gpu` or `cpu` for a value of `GPU=`, and a remark for the user, if any.

    Raises `GpuError` for GPU=1 if no GPU can be used, and for a value that is not "", 0 or 1.
    """
    if wanted not in ("", "0", "1"):
        raise GpuError(f"GPU={wanted} is neither 0 nor 1.")
    if wanted == "0":
        return "cpu", ""
    try:
        find(library)
    except GpuError as error:
        if wanted:
            raise
        is_absent = isinstance(error, NoGpuError)
        return "cpu", "" if is_absent else f"Running on the CPU: {error}"
    return "gpu", ""


def find(library: str = LIBRARY) -> list[Gpu]:
    """The GPUs that CUDA shows a process here, the engine's first; raises `GpuError`."""
    command = [sys.executable, "-I", __file__, "--probe", library]
    try:
        ended = subprocess.run(  # noqa: S603 - this file
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise GpuError(
            f"the NVIDIA driver does not answer within {PROBE_SECONDS:.0f} s: look at nvidia-smi "
            f"and dmesg, or {_OPTIONAL}"
        ) from None
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        raise GpuError(
            f"{library} ended its process with status {ended.returncode}: reinstall the NVIDIA "
            f"driver, or {_OPTIONAL}"
        ) from None
    if "error" in answer:
        raise (NoGpuError if answer["is_absent"] else GpuError)(answer["error"])
    return [Gpu(one["name"], one["memory"], tuple(one["capability"])) for one in answer["gpus"]]


def probe(library: str) -> list[Gpu]:
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        raise NoGpuError(
            f"there is no NVIDIA driver ({library} cannot be loaded): install driver {DRIVER} or "
            f"newer (in a container: start it with the NVIDIA container toolkit), or {_OPTIONAL}"
        ) from None
    return describe(driver)


def describe(driver: Any) -> list[Gpu]:
    _call(driver, "cuInit", 0)
    version = _read(driver, "cuDriverGetVersion")
    found = (version // 1000, version % 1000 // 10)
    if found < CUDA:
        raise GpuError(
            f"the NVIDIA driver is for CUDA {_dotted(found)}, and vLLM here needs CUDA "
            f"{_dotted(CUDA)}: install driver {DRIVER} or newer, or {_OPTIONAL}"
        )
    count = _read(driver, "cuDeviceGetCount")
    gpus = [_describe_device(driver, ordinal) for ordinal in range(count)]
    if not gpus:
        raise _no_device()
    if gpus[0].capability < CAPABILITY:
        raise GpuError(
            f"{gpus[0].name} has compute capability {_dotted(gpus[0].capability)}, and vLLM here "
            f"needs {_dotted(CAPABILITY)}: choose another GPU with CUDA_VISIBLE_DEVICES, or "
            f"{_OPTIONAL}"
        )
    return gpus


def _describe_device(driver: Any, ordinal: int) -> Gpu:
    device = ctypes.c_int(_read(driver, "cuDeviceGet", ordinal))
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(driver, "cuDeviceGetName", name, _NAME_BYTES, device)
    memory = _read(driver, "cuDeviceTotalMem_v2", device, kind=ctypes.c_size_t)
    major = _read(driver, "cuDeviceGetAttribute", _MAJOR, device)
    minor = _read(driver, "cuDeviceGetAttribute", _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), memory, (major, minor))


def _read(driver: Any, function: str, *arguments: Any, kind: Any = ctypes.c_int) -> int:
    """Call a function whose first argument is the place of its result."""
    result = kind()
    _call(driver, function, ctypes.byref(result), *arguments)
    return int(result.value)


def _call(driver: Any, function: str, *arguments: Any) -> None:
    status = getattr(driver, function)(*arguments)
    if status == _NO_DEVICE:
        raise _no_device()
    if status != 0:
        raise GpuError(
            f"the NVIDIA driver fails ({function}: CUDA error {status}): look at nvidia-smi and "
            f"dmesg, reboot after a driver's update, or {_OPTIONAL}"
        )


def _no_device() -> NoGpuError:
    return NoGpuError(
        "the NVIDIA driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES (in a "
        f"container: at its --gpus), or {_OPTIONAL}"
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("wanted", nargs="?", default="", help="value of GPU=")
    parser.add_argument("--library", default=LIBRARY, help=argparse.SUPPRESS)
    parser.add_argument("--probe", metavar="LIBRARY", help="describe the GPUs as JSON")
    options = parser.parse_args()
    if options.probe:
        sys.stdout.write(json.dumps(_answer(options.probe)))
        return 0
    try:
        chosen, remark = choose(options.wanted, options.library)
    except GpuError as error:
        sys.stdout.write(f"{str(error).removesuffix('.')}\n")  # make adds a period
        return 1
    if remark:
        sys.stderr.write(f"{remark}\n")
    sys.stdout.write(f"{chosen}\n")
    return 0


def _answer(library: str) -> dict[str, Any]:
    try:
        return {"gpus": [asdict(gpu) for gpu in probe(library)]}
    except GpuError as error:
        return {"error": str(error), "is_absent": isinstance(error, NoGpuError)}


if __name__ == "__main__":
    sys.exit(main())
