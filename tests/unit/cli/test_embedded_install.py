"""The installer's decisions; that it installs is shown by every environment these tests run in."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.cli.up import install as module
from app.cli.up.install import TARGETS, InstallError, Uv, find_python, install

SERVICE, CPU = TARGETS["service"], TARGETS["cpu"]


@pytest.fixture
def pythons(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The Pythons of this machine, as the installer sees them: program to version."""
    found: dict[str, str] = {}
    monkeypatch.setattr(module, "candidates", lambda _: list(found))
    monkeypatch.setattr(module, "version_of", lambda program: found.get(str(program), ""))
    monkeypatch.setattr(module, "has_shared_library", lambda program: "static" not in program)
    return found


def test_the_first_python_that_fits_is_taken(pythons: dict[str, str]) -> None:
    pythons.update({"old": "3.9", "twelve": "3.12", "eleven": "3.11"})
    assert find_python(SERVICE, "") == "twelve"
    assert find_python(CPU, "") == "eleven"


def test_triton_needs_the_shared_library(pythons: dict[str, str]) -> None:
    pythons.update({"static": "3.11", "shared": "3.11"})
    assert find_python(CPU, "") == "shared"
    assert find_python(SERVICE, "") == "static"
    del pythons["shared"]
    with pytest.raises(InstallError, match=r"^static has no libpython3.11.*apt-get install"):
        find_python(CPU, "")


def test_no_python_is_reported_with_both_remedies(pythons: dict[str, str]) -> None:
    with pytest.raises(InstallError, match=r"no Python 3.11: .*TRITON_PYTHON=PROGRAM\.$"):
        find_python(CPU, "")
    with pytest.raises(InstallError, match=r"no Python 3.11, 3.12, 3.13: .* PYTHON=PROGRAM\.$"):
        find_python(SERVICE, "")


def test_a_python_that_was_named_is_the_only_choice(pythons: dict[str, str]) -> None:
    pythons.update({"good": "3.11", "bad": "3.9"})
    with pytest.raises(InstallError, match=r"^bad is not Python 3.11"):
        find_python(CPU, "bad")


def test_the_real_python_is_recognised() -> None:
    assert module.version_of(sys.executable) == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert module.version_of("/nowhere/python") == ""
    assert sys.executable not in module.candidates(["3.11"])  # never one of an environment


def test_uv_gets_what_pip_is_configured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "\n".join(
        (
            "global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'",
            "global.cert='/etc/certificates'",
            "global.find-links='/one /two'",
            ":env:.find-links='/three'",
            "install.no-deps='true'",
        )
    )
    monkeypatch.setattr(module, "output_of", lambda _: listing)
    monkeypatch.setenv("UV_INDEX_STRATEGY", "first-index")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    environment = Uv(Path("venv"), Path("bin/python")).environment
    assert environment["UV_INDEX"] == "https://a.example/simple https://b.example/simple"
    assert environment["UV_FIND_LINKS"] == "/three"
    assert environment["SSL_CERT_FILE"] == "/etc/certificates"
    assert environment["UV_INDEX_STRATEGY"] == "first-index"


class Machine:
    """Records the commands that would install, and lets one of them fail."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.failing = "nothing"

    def run(self, command: Sequence[str], _environment: object = None) -> None:
        text = " ".join(command)
        self.commands.append(text)
        if self.failing in text:
            raise InstallError(f"{self.failing} failed")

    def make(self, _target: object, _program: str, venv: Path) -> None:
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(sys.executable)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(module, "run", machine.run)
    monkeypatch.setattr(module, "make_environment", machine.make)
    monkeypatch.setattr(module, "find_python", lambda *_: sys.executable)
    monkeypatch.setattr(Uv, "try_install", lambda *_: False)
    real = module.output_of
    monkeypatch.setattr(module, "output_of", lambda c: "" if "pip" in c else real(c))
    return machine


def test_an_interrupted_install_starts_again(machine: Machine, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    machine.failing = "uv pip install"
    with pytest.raises(InstallError):
        install(SERVICE, venv, "")
    (venv / "half a package").touch()
    machine.failing = "nothing"
    install(SERVICE, venv, "")
    assert not (venv / "half a package").exists()
    (venv / "kept").touch()
    install(SERVICE, venv, "")
    assert (venv / "kept").exists()


def test_an_environment_whose_python_is_gone_is_made_again(
    machine: Machine, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    install(SERVICE, venv, "")
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nowhere/python")
    install(SERVICE, venv, "")
    assert module.version_of(venv / "bin" / "python")


def test_torch_comes_from_its_own_index_only_when_nowhere_else(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(CPU, tmp_path / "one", "")
    assert module.TORCH_INDEX in machine.commands[-1]
    machine.commands.clear()
    monkeypatch.setattr(Uv, "try_install", lambda *_: True)
    install(CPU, tmp_path / "two", "")
    assert not any(module.TORCH_INDEX in command for command in machine.commands)


def test_too_little_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 5 * 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InstallError, match=r"^5 MiB free in .*, 6000 MiB needed.*LIGHT=1"):
        module.check_space(tmp_path, 6_000)


def test_a_command_that_fails_ends_in_one_line(tmp_path: Path) -> None:
    script = Path(module.__file__)
    ended = subprocess.run(
        [sys.executable, "-I", script, "cpu", tmp_path / "venv", "--python", "/nowhere/python"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Cannot install: ")
    assert ended.stderr.count("\n") == 1
