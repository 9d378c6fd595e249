"""Make the two environments, from nothing but a Python: a script for the Makefile.

    python3 -I install.py service|dev|light|cpu VENV [--python PROGRAM]

It runs before anything is installed, so it needs the standard library only, and any Python that
is too old gets as far as being told so. pip brings uv (pinned, with its hash), uv brings the rest:
about a tenth of pip's time. Everything found wrong is told in one line with its remedy.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRITON_VERSION = (3, 11)
SERVICE_VERSIONS = ((3, 11), (3, 12), (3, 13))
REPEAT_SECONDS = 10
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# What to install, in order, and the space needed for it (MiB, with room for the downloads).
LOCKS = {
    "service": (["requirements.txt", "requirements-embedded.txt"], 1_000),
    "dev": (["requirements.txt", "requirements-embedded.txt", "requirements-dev.txt"], 1_200),
    "light": (["triton/requirements-light.txt"], 800),
    "cpu": (["triton/requirements-cpu.txt"], 8_000),
}
NEEDS = {"service": "the service", "dev": "the service with its tests", "light": "Triton"}
NEEDS["cpu"] = "Triton and vLLM (2 GB to download, minutes)"


class InstallError(Exception):
    """What went wrong and its remedy, in one line."""


def main() -> int:
    """Install one set into one environment; the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=sorted(LOCKS))
    parser.add_argument("venv", type=Path)
    parser.add_argument("--python", default="", help="the Python to use, instead of looking")
    options = parser.parse_args()
    try:
        install(options.what, options.venv, options.python)
    except InstallError as error:
        sys.stderr.write("Cannot install: %s\n" % error)  # noqa: UP031 - for a Python too old
        return 1
    return 0


def install(what: str, venv: Path, python: str) -> None:
    """Bring the environment to what the locks say, from whatever state it is in."""
    locks, space = LOCKS[what]
    unfinished = venv / ".unfinished"
    if unfinished.exists() or not runs(venv / "bin" / "python"):
        # Half a package looks installed to every installer: begin again.
        shutil.rmtree(venv, ignore_errors=True)
    if not venv.exists():
        check_space(venv, space)
        make_environment(what, venv, python)
    unfinished.touch()
    started = time.monotonic()
    say("Installing %s" % NEEDS[what])  # noqa: UP031
    bring_uv(venv)
    files = [argument for lock in locks for argument in ("-r", str(ROOT / lock))]
    dependencies = ["--no-deps"] if what in ("light", "cpu") else []
    uv_install(venv, ["--require-hashes", *dependencies, *files])
    if what == "cpu":
        install_torch(venv)
    unfinished.unlink()
    say("Installed in %.0f s" % (time.monotonic() - started))  # noqa: UP031


def make_environment(what: str, venv: Path, python: str) -> None:
    """A new virtual environment with pip, of a Python that fits."""
    if what in ("light", "cpu"):
        program = find_python([TRITON_VERSION], python, "TRITON_PYTHON", shared_library=True)
    else:
        program = find_python(SERVICE_VERSIONS, python, "PYTHON", shared_library=False)
    made = subprocess.run(
        [program, "-m", "venv", str(venv)], check=False, capture_output=True, text=True
    )
    if made.returncode != 0:
        version = "%d.%d" % version_of(program)[:2]  # noqa: UP031
        raise InstallError(
            f"{program} cannot make a virtual environment: install the package "
            f"python{version}-venv (apt-get install python{version}-venv)."
        )


def find_python(versions, wanted, variable, *, shared_library):  # type: ignore[no-untyped-def]
    """The first Python of these versions that runs and, for Triton, has its shared library."""
    names = ", ".join("%d.%d" % version for version in versions)  # noqa: UP031
    library_missing = ""
    for program in [wanted] if wanted else candidates(versions):
        version = version_of(program)
        if version[:2] not in versions:
            continue
        if shared_library and not has_libpython(program):
            library_missing = library_missing or program
            continue
        return program
    if library_missing:
        raise InstallError(
            f"{library_missing} has no libpython3.11.so.1.0, which Triton needs: install "
            "libpython3.11 (apt-get install libpython3.11), or name another with "
            f"{variable}=/path/to/python."
        )
    found = f"{wanted} is not" if wanted else "there is no"
    raise InstallError(
        f"{found} Python {names}: install one (Debian 12: apt-get install python3.11-venv "
        "libpython3.11; elsewhere: pip install uv && uv python install 3.11), or name it with "
        f"{variable}=/path/to/python."
    )
