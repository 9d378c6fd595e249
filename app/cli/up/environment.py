"""Directories of `up`, and Triton's environment, which the package installs at its first start.

In a checkout, make installs the environments.
"""

import fcntl
import hashlib
import os
import sys
from pathlib import Path

import platformdirs

from app.cli.up import install
from app.core.program import IS_PACKAGE

_NAME = "llm-api-service"


def user_directory() -> Path:
    """The user's directory of the package: XDG_DATA_HOME, or ~/.local/share, and its name."""
    return platformdirs.user_data_path(_NAME, appauthor=False)


def data_directory() -> Path:
    """The default of `--data`; that of a checkout is below the working directory."""
    return user_directory() if IS_PACKAGE else Path(".data")


def triton_environment(*, light: bool, gpu: bool) -> Path:
    """The package's environment of Triton, brought to the state of its locks.

    All data directories share it. Raises install.InstallError.
    """
    directory = user_directory() / "environments"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = "gpu" if gpu else "light" if light else "cpu"
    venv = directory / ("triton-gpu" if gpu else "triton")
    with (directory / f"{venv.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"Waiting for another process that installs {venv}\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # The full set holds the light one.
        if not any(_is_current(one, venv) for one in {name, "cpu" if light else name}):
            target = install.TARGETS[name]
            install.install(target, venv, os.environ.get("TRITON_PYTHON", ""))
            _stamp(name, venv).write_text(_digest(target))
    return venv


def _is_current(name: str, venv: Path) -> bool:
    """True if the environment was installed from these locks and its Python runs."""
    stamp = _stamp(name, venv)
    return (
        stamp.exists()
        and stamp.read_text() == _digest(install.TARGETS[name])
        and not (venv / ".unfinished").exists()
        and bool(install.version_of(venv / "bin" / "python"))
    )


def _stamp(name: str, venv: Path) -> Path:
    return venv / f".{name}"


def _digest(target: install.Target) -> str:
    locks = [*target.locks, *([target.torch_lock] if target.torch_lock else [])]
    return hashlib.sha256(
        b"".join((install.ROOT / lock).read_bytes() for lock in locks)
    ).hexdigest()
