"""Directories of the package's command, and when it installs Triton's environment."""

import sys
from pathlib import Path

import pytest

from app.cli.up import environment, install
from app.cli.up.environment import data_directory, triton_environment
from app.cli.up.install import InstallError, Target
from app.core import program


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Titles of the sets that were installed, into environments with a Python and nothing else."""
    installed: list[str] = []

    def record(target: Target, venv: Path, _python: str) -> None:
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").unlink(missing_ok=True)
        (venv / "bin" / "python").symlink_to(sys.executable)
        installed.append(target.title)

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    for name in ("light", "cpu", "gpu"):
        lock = tmp_path / f"{name}.txt"
        lock.write_text(name)
        monkeypatch.setitem(install.TARGETS, name, Target(name, (str(lock),), 1, is_triton=True))
    monkeypatch.setattr(install, "install", record)
    return installed


def test_data_of_a_checkout_is_below_the_working_directory() -> None:
    assert data_directory() == Path(".data")


def test_data_of_the_package_is_in_the_users_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "IS_PACKAGE", True)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_directory() == tmp_path / "llm-api-service"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_directory() == tmp_path / ".local" / "share" / "llm-api-service"


def test_an_environment_is_installed_once(titles: list[str], tmp_path: Path) -> None:
    venv = triton_environment(light=True, gpu=False)
    assert venv == tmp_path / "share" / "llm-api-service" / "environments" / "triton"
    assert triton_environment(light=True, gpu=False) == venv
    assert titles == ["light"]


def test_the_full_set_holds_the_light_one(titles: list[str]) -> None:
    venv = triton_environment(light=True, gpu=False)
    assert triton_environment(light=False, gpu=False) == venv
    assert triton_environment(light=True, gpu=False) == venv
    assert triton_environment(light=False, gpu=True) != venv
    assert titles == ["light", "cpu", "gpu"]


def test_a_new_lock_is_installed(titles: list[str], tmp_path: Path) -> None:
    triton_environment(light=False, gpu=False)
    (tmp_path / "cpu.txt").write_text("newer")
    triton_environment(light=False, gpu=False)
    assert titles == ["cpu", "cpu"]


@pytest.mark.parametrize("lost", [".unfinished", "bin/python"])
def test_a_broken_environment_is_installed_again(titles: list[str], lost: str) -> None:
    venv = triton_environment(light=True, gpu=False)
    if lost == ".unfinished":
        (venv / lost).touch()
    else:
        (venv / lost).unlink()
    triton_environment(light=True, gpu=False)
    assert titles == ["light", "light"]


def test_a_failed_installation_is_repeated(
    titles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise InstallError("no network")

    with monkeypatch.context() as patched:
        patched.setattr(install, "install", fail)
        with pytest.raises(InstallError):
            triton_environment(light=True, gpu=False)
    triton_environment(light=True, gpu=False)
    assert titles == ["light"]


@pytest.mark.parametrize(
    ("given", "make", "package"),
    [
        (("PORT", 8888), "PORT=8888", "--port 8888"),
        (("UI_PORT", 1), "UI_PORT=1", "--ui-port 1"),
        (("DATA",), "DATA=", "--data"),
        (("LIGHT", 1), "LIGHT=1", "--light"),
        (("GPU", 0), "GPU=0", "--no-gpu"),
    ],
)
def test_remedies_name_arguments_as_the_user_gives_them(
    given: tuple[str, object], make: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program.argument(*given) == make
    monkeypatch.setattr(program, "IS_PACKAGE", True)
    assert program.argument(*given) == package
