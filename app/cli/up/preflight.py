"""Checks before a start: each problem is reported in one line with its remedy."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.cli.up import gpu
from app.cli.up.gpu import Gpu, GpuError
from app.cli.up.processes import StartError, free_port, is_port_free
from app.core.memory import available_memory
from app.core.program import IS_PACKAGE, argument

MIB = 2**20
# Measured with `make run` (see README): PostgreSQL, API, worker and tritonserver; then the engine.
LIGHT_MEMORY = 700 * MIB
ENGINE_MEMORY = 2_200 * MIB
DISK = 500 * MIB
SHARED_MEMORY = 48 * MIB
# Share of a GPU's memory that an entry lets vLLM take (gpu_memory_utilization).
GPU_SHARE = 0.9
# Seconds for a Python to print its configuration.
_PYTHON_SECONDS = 20
# Quantizations of vLLM that compress the weights while it loads them; prefixes of their names.
_ON_LOAD = (
    "fp8", "int8_per_channel", "nvfp4_per_token", "mxfp8", "experts_int8", "online", "torchao",
)  # fmt: skip


@contextmanager
def lock(data: Path) -> Iterator[None]:
    """Create the data directory and lock it against other runs; freed even by kill -9."""
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = data.stat().st_uid
        if owner != os.geteuid():
            raise StartError(
                f"The data directory {data} belongs to user {owner}: choose another with {argument('DATA')}."
            )
        lock_file = (data / "lock").open("a+")
    except OSError as error:
        raise StartError(
            f"{error.filename}: {error.strerror}. Choose another with {argument('DATA')}."
        ) from error
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_file.seek(0)
            raise StartError(
                f"The data directory {data} is in use by a run with process id "
                f"{lock_file.read() or '?'}: stop that one, or choose another with {argument('DATA')}."
            ) from None
        lock_file.truncate(0)
        lock_file.write(str(os.getpid()))
        lock_file.flush()
        yield


def check(*, port: int, data: Path, venv: Path, light: bool) -> None:
    if not (venv / "bin" / "python").exists():
        raise StartError(
            f"{venv} is missing or unfinished: "
            + (
                "`up` installs one if --triton-venv is left out."
                if IS_PACKAGE
                else "`make run` installs it."
            )
        )
    if not is_port_free(port):
        raise StartError(f"Port {port} is taken: choose another with {argument('PORT', port + 1)}.")
    needed = LIGHT_MEMORY if light else ENGINE_MEMORY
    available = available_memory()
    if available < needed:
        remedy = "close something" if light else f"close something, or use {argument('LIGHT', 1)}"
        raise StartError(
            f"Too little memory: {available // MIB} MiB available, {needed // MIB} MiB needed: "
            f"{remedy}."
        )
    _check_space(data, DISK, f"choose another disk with {argument('DATA')}")
    _check_space(Path("/dev/shm"), SHARED_MEMORY, "in a container, give it --shm-size=256m")  # noqa: S108


def choose_ui_port(port: int, asked: int | None) -> int:
    """The web page's port: the requested one, else the next after the API's, else a free one.

    Raises `StartError` if the requested one is taken.
    """
    if asked is None:
        return port + 1 if port < 65535 and is_port_free(port + 1) else free_port()
    if not is_port_free(asked):
        raise StartError(
            f"Port {asked} is taken: choose another with {argument('UI_PORT', asked + 1)}."
        )
    return asked


def _check_space(directory: Path, needed: int, remedy: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StartError(
            f"Too little space in {directory}: {free // MIB} MiB free, {needed // MIB} MiB needed: "
            f"{remedy}."
        )


def find_gpus(venv: Path) -> list[Gpu]:
    """The machine's GPUs; raises `StartError` if vLLM could not use them.

    vLLM's kernels in Triton (the language) are compiled at run time, by a C compiler.
    """
    try:
        gpus = gpu.find()
    except GpuError as error:
        raise StartError(str(error)) from error
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang"))):
        raise StartError(
            "There is no C compiler, which vLLM needs on a GPU: `apt-get install gcc`, or use "
            f"{argument('GPU', 0)}."
        )
    code = "import sysconfig; print(sysconfig.get_paths(scheme='posix_prefix')['include'])"
    printed = subprocess.run(  # noqa: S603 - the environment's own Python
        [venv / "bin" / "python", "-I", "-c", code],
        capture_output=True,
        text=True,
        timeout=_PYTHON_SECONDS,
        check=False,
    )
    header = Path(printed.stdout.strip(), "Python.h")
    if not header.exists():
        raise StartError(
            f"There is no {header}, which vLLM needs on a GPU: `apt-get install "
            f"{header.parent.name}-dev`, or use {argument('GPU', 0)}."
        )
    return gpus


def check_weights(weights: Path, gpus: Sequence[Gpu] = (), quantization: str | None = None) -> None:
    """Raise `StartError` when a model's weights would not fit: into memory, or the first GPU's."""
    size = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    if gpus:
        room = int(gpus[0].memory * GPU_SHARE)
        if size > room and not (quantization or "").startswith(_ON_LOAD):
            raise StartError(
                f"{weights.name} does not fit {gpus[0].name}: {size // MIB} MiB of weights, "
                f"{room // MIB} MiB for vLLM: choose a smaller model with {argument('MODEL')}, or compress it "
                f"with {argument('QUANTIZATION', 'fp8')}."
            )
        return
    needed = ENGINE_MEMORY + size
    available = available_memory()
    if available < needed:
        raise StartError(
            f"Too little memory for {weights.name}: {available // MIB} MiB available, "
            f"{needed // MIB} MiB needed: choose a smaller model with {argument('MODEL')}."
        )
