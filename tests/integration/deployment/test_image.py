"""The commands in the Docker image: its files, as the Dockerfile copies them, and no library but its own."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from app.cli.main import _COMMANDS

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = ["model", "up"]  # they install and start PostgreSQL, Triton and models on a machine
# Runs `COMMAND --help` of all commands; an import of a library outside of the lock fails, as in the image.
PROBE = r"""
import contextlib, io, json, re, sys
from importlib import import_module
from importlib.metadata import packages_distributions
from pkgutil import walk_packages

locked, commands = json.loads(sys.stdin.read())
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
owners = {top: {normal(one) for one in names} for top, names in packages_distributions().items()}

class OnlyLocked:
    def find_spec(self, name, path=None, target=None):
        found = owners.get(name.partition(".")[0])
        if found and not found & set(locked):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyLocked())
from app.cli.main import main

ends = {}
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([command, "--help"])
        except SystemExit as ended:
            status = ended.code
        except Exception as error:
            status = repr(error)
    ends[command] = [status, out.getvalue(), err.getvalue()]
missing = {}
import app
for module in walk_packages(app.__path__, "app."):
    try:
        if not module.name.endswith("__main__"):
            import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps([ends, missing]))
"""


@dataclass(frozen=True)
class Found:
    """Exit status, output and errors of each command; modules that lack a library, and its name."""

    ends: dict[str, tuple[int | str, str, str]]
    missing: dict[str, str]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Found:
    files = tmp_path_factory.mktemp("image")
    copies = re.findall(
        r"^COPY (?!--)(\S+) (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    assert ("app", "app") in copies
    for source, target in copies:
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, files / target, ignore=ignored)
        elif target != ".":  # the lock, of the stage that installs the libraries
            (files / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, files / target)
    locked = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    names = [re.sub(r"[-_.]+", "-", name).lower() for name in locked]
    assert "fastapi" in names
    ended = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=files, input=orjson.dumps([names, list(_COMMANDS)]), capture_output=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr.decode()
    return Found(*orjson.loads(ended.stdout))


def test_the_image_runs_every_command_of_a_deployment(image: Found) -> None:
    assert {name for name, (status, *_) in image.ends.items() if status != 0} == set(ELSEWHERE)
    helped = [out for _, out, _ in image.ends.values() if out.startswith("usage: ")]
    assert len(helped) == len(_COMMANDS) - len(ELSEWHERE) > 10


def test_no_module_of_a_deployment_lacks_a_library(image: Found) -> None:
    assert image.missing
    assert {name for name in image.missing if not name.startswith("app.cli.up.")} == {
        "app.cli.model"
    }


@pytest.mark.parametrize("command", ELSEWHERE)
def test_a_command_of_a_checkout_names_the_missing_library_and_the_remedy(
    image: Found, command: str
) -> None:
    status, out, err = image.ends[command]
    assert (status, out) == (2, "")
    assert re.fullmatch(
        rf"python -m app {command} needs the library [a-z]+, which the Docker image lacks: use `make .*\n",
        err,
    )
