"""Refusals of `up` before it starts anything: each in one line with its remedy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.cli.up import preflight
from app.cli.up.processes import StartError


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A directory that counts as a finished environment."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    return tmp_path / "venv"


@pytest.fixture
def check(tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The checks, on a machine that passes all of them."""
    monkeypatch.setattr(preflight, "is_port_free", lambda port: port != 1234)
    set_memory(monkeypatch, 16_000)
    set_free_space(monkeypatch, 50_000)

    def run(*, port: int = 8887, venv: Path = venv, light: bool = False) -> None:
        preflight.check(port=port, data=tmp_path, venv=venv, light=light)

    return run


def set_memory(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: mib * preflight.MIB)


def set_free_space(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    usage = SimpleNamespace(free=mib * preflight.MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_a_machine_that_has_all_passes(check: Callable[..., None]) -> None:
    check()
    check(light=True)


def test_taken_port(check: Callable[..., None]) -> None:
    with pytest.raises(StartError, match=r"^Port 1234 is taken: choose another with PORT=1235\.$"):
        check(port=1234)


def test_missing_environment(check: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(StartError, match="missing or unfinished: `make run` installs it"):
        check(venv=tmp_path / "nothing")


def test_too_little_memory(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, 1_000)
    with pytest.raises(StartError, match=r"^Too little memory: 1000 MiB available.*LIGHT=1"):
        check()
    check(light=True)
    set_memory(monkeypatch, 100)
    with pytest.raises(StartError, match=r"^Too little memory: 100 MiB"):
        check(light=True)


def test_too_little_space(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_space(monkeypatch, 3)
    with pytest.raises(StartError, match=r"^Too little space in .*: 3 MiB free.*DATA="):
        check()


def test_a_data_directory_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    data = tmp_path / "data"
    lock = f"from app.cli.up import preflight\nwith preflight.lock(__import__('pathlib').Path({str(data)!r})): "
    with preflight.lock(data):
        other = subprocess.run(
            [sys.executable, "-c", f"{lock}pass"], capture_output=True, text=True, check=False
        )
        assert "is in use by a run with process id" in other.stderr.splitlines()[-1]
    # Its file stays, its hold does not: also after kill -9.
    killed = subprocess.run(
        [sys.executable, "-c", f"{lock}__import__('os').kill(__import__('os').getpid(), 9)"],
        check=False,
    )
    assert killed.returncode == -9
    with preflight.lock(data):
        pass


def test_a_data_directory_of_someone_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StartError, match="belongs to user"), preflight.lock(tmp_path):
        pass


def test_a_data_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="DATA="), preflight.lock(tmp_path / "file" / "data"):
        pass
