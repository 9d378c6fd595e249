"""Installer of an environment that needs only a Python: a script for the Makefile.

    python3 -I install.py service|dev|recipes .venv [--python PROGRAM]
    .venv/bin/python -I install.py light|cpu .venv-triton [--python PROGRAM]

It runs before anything is installed, so it uses the standard library only. pip installs uv (pinned
by its hash) into `.venv`, and uv the rest, in a fraction of pip's time.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[3]
REPEAT_SECONDS = 10
# Where PyTorch publishes its builds without CUDA; they are not on PyPI.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_DISTRIBUTION_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


class InstallError(Exception):
    """A failed installation and its remedy, in one line."""


@dataclass(frozen=True)
class Target:
    """Packages to install: locks with hashes, then those without."""

    title: str
    locks: tuple[str, ...]
    space_mib: int  # installed and downloaded
    versions: tuple[str, ...] = ("3.11", "3.12", "3.13")
    is_triton: bool = False
    torch_lock: str = ""


_SERVICE = ("requirements.txt", "requirements-embedded.txt")
TARGETS = {
    "service": Target("the service", _SERVICE, 1_000),
    "dev": Target("the service and its tests", (*_SERVICE, "requirements-dev.txt"), 1_200),
    "recipes": Target(
        "the libraries of docs/recipes.md and docs/scoring.md", ("requirements-recipes.txt",), 1_500
    ),
    "light": Target("Triton", ("triton/requirements-light.txt",), 800, ("3.11",), is_triton=True),
    "cpu": Target(
        "Triton and vLLM (1 GB to download)",
        ("triton/requirements-cpu.txt",),
        6_000,
        ("3.11",),
        is_triton=True,
        torch_lock="triton/requirements-torch.txt",
    ),
    "gpu": Target(
        "Triton and vLLM for NVIDIA GPUs (4 GB to download)",
        ("triton/requirements-gpu.txt",),
        10_000,
        ("3.11",),
        is_triton=True,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("venv", type=Path)
    parser.add_argument("--python", default="", help="the Python to use, instead of looking")
    options = parser.parse_args()
    try:
        install(TARGETS[options.target], options.venv, options.python)
    except InstallError as error:
        write_line(f"Cannot install: {error}")
        return 1
    return 0


def install(target: Target, venv: Path, python: str) -> None:
    """Bring the environment to the state of the locks, from any state."""
    unfinished = venv / ".unfinished"
    if unfinished.exists() or not version_of(venv / "bin" / "python"):
        # To every installer a half installed package looks complete: begin again.
        shutil.rmtree(venv, ignore_errors=True)
    started = time.monotonic()
    if not venv.exists():
        check_space(venv.absolute().parent, target.space_mib)
        program = find_python(target, python)
        write_line(f"Making {venv} with {program}")
        venv.mkdir()
        unfinished.touch()
        make_environment(target, program, venv)
    unfinished.touch()
    write_line(f"Installing {target.title}")
    if not target.is_triton:
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        pinned = ["--no-deps", "--require-hashes", "-r", str(ROOT / "requirements-uv.txt")]
        run([*pip, "install", "--quiet", *pinned])
    uv = Uv(venv, Path(sys.executable) if target.is_triton else venv / "bin" / "python")
    locks = [argument for lock in target.locks for argument in ("-r", str(ROOT / lock))]
    uv.install(["--require-hashes", *(["--no-deps"] if target.is_triton else []), *locks])
    if target.torch_lock:
        torch = ["--no-deps", "-r", str(ROOT / target.torch_lock)]
        if not uv.try_install(torch):
            uv.install([*torch, "--default-index", TORCH_INDEX])
    unfinished.unlink()
    write_line(f"Installed in {time.monotonic() - started:.0f} s")


class Uv:
    """uv with pip's configuration, which it does not read itself."""

    _SETTINGS = {  # noqa: RUF012 - pip's name, uv's name, uv's separator of a list
        "index-url": ("UV_DEFAULT_INDEX", ""),
        "extra-index-url": ("UV_INDEX", " "),
        "find-links": ("UV_FIND_LINKS", ","),
        "no-index": ("UV_NO_INDEX", ""),
        "cert": ("SSL_CERT_FILE", ""),
        "trusted-host": ("UV_INSECURE_HOST", " "),
        "proxy": ("ALL_PROXY", ""),
    }

    def __init__(self, venv: Path, python: Path) -> None:
        """`python` is that of the environment which has pip and uv."""
        self._command = [str(python.with_name("uv")), "pip", "install", "--python", str(venv)]
        # pip takes the best of all indexes; with required hashes that is safe.
        self.environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", **os.environ}
        configured = {}
        for line in output_of([str(python), "-m", "pip", "config", "list"]).splitlines():
            key, _, value = line.partition("=")
            section, _, name = key.rpartition(".")
            configured[section, name] = str(ast.literal_eval(value))
        # The last of pip's sections first, as it wins.
        for section in (":env:", "install", "global"):
            for name, (variable, separator) in self._SETTINGS.items():
                if value := configured.get((section, name), ""):
                    joined = separator.join(value.split()) if separator else value
                    self.environment.setdefault(variable, joined)

    def install(self, arguments: Sequence[str]) -> None:
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        run([*self._command, *quiet, *arguments], self.environment)

    def try_install(self, arguments: Sequence[str]) -> bool:
        """Install silently; return False after a failure."""
        with heartbeat():
            tried = subprocess.run(  # noqa: S603 - our own command
                [*self._command, *arguments], check=False, capture_output=True, env=self.environment
            )
        return tried.returncode == 0


def find_python(target: Target, wanted: str) -> str:
    """The first Python that fits and, for Triton, has its shared library."""
    names, variable = ", ".join(target.versions), "TRITON_PYTHON" if target.is_triton else "PYTHON"
    without_library = ""
    for program in [wanted] if wanted else candidates(target.versions):
        if version_of(program) not in target.versions:
            continue
        if not target.is_triton or has_shared_library(program):
            return program
        without_library = without_library or program
    if without_library:
        raise InstallError(
            f"{without_library} has no libpython3.11.so.1.0, which Triton needs: "
            f"`apt-get install libpython3.11`, or name another Python with {variable}=PROGRAM."
        )
    remedy = (
        f"{Path(sys.executable).with_name('uv')} python install 3.11"
        if target.is_triton
        else "apt-get install python3"
    )
    raise InstallError(
        f"{wanted + ' is not' if wanted else 'there is no'} Python {names}: `{remedy}`, "
        f"or name one with {variable}=PROGRAM."
    )


def candidates(versions: Sequence[str]) -> list[str]:
    """Programs that may be a Python of these versions, the likeliest first."""
    found = [getattr(sys, "_base_executable", sys.executable)]
    for version in versions:
        found.append(shutil.which(f"python{version}") or "")
        for pattern in (
            f".pyenv/versions/{version}.*/bin/python{version}",
            f".local/share/uv/python/cpython-{version}*/bin/python{version}",
        ):
            found += map(str, sorted(Path.home().glob(pattern), reverse=True))
        found.append(f"/usr/bin/python{version}")
    return [program for program in found if program]


def version_of(program: str | Path) -> str:
    return output_of(
        [str(program), "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    )


def has_shared_library(program: str) -> bool:
    """True if libpython3.11.so.1.0 is in the directory where triton/layout.sh looks for it."""
    code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    own = output_of([program, "-I", "-c", code])
    return any(
        Path(directory, "libpython3.11.so.1.0").exists()
        for directory in (own, f"{own}/x86_64-linux-gnu", *_DISTRIBUTION_LIBRARIES)
    )


def make_environment(target: Target, program: str, venv: Path) -> None:
    if target.is_triton:
        uv = Path(sys.executable).with_name("uv")
        run([str(uv), "venv", "--quiet", "--allow-existing", "--python", program, str(venv)])
        return
    made = subprocess.run(  # noqa: S603 - the Python we looked for
        [program, "-m", "venv", str(venv)], check=False, capture_output=True
    )
    if made.returncode != 0:
        package = f"python{version_of(program)}-venv"
        raise InstallError(
            f"{program} cannot make a virtual environment: `apt-get install {package}`."
        )


def check_space(directory: Path, needed_mib: int) -> None:
    free_mib = shutil.disk_usage(directory).free // 2**20
    if free_mib < needed_mib:
        raise InstallError(
            f"{free_mib} MiB free in {directory}, {needed_mib} MiB needed: make room there, "
            "or use LIGHT=1 (`up --light`), which needs no vLLM."
        )


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    with heartbeat():
        status = subprocess.run(command, check=False, env=environment).returncode  # noqa: S603
    if status != 0:
        raise InstallError(
            f"{Path(command[0]).name} failed (see above): check the network and `pip config list`, "
            "then repeat the command."
        )


def output_of(command: Sequence[str]) -> str:
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    except OSError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


@contextmanager
def heartbeat() -> Iterator[None]:
    """If no terminal shows uv's progress, print from time to time that it continues."""
    done, started = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(REPEAT_SECONDS):
            write_line(f"  still installing, {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=beat)
    if not sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def write_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
