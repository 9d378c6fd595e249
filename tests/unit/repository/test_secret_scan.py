"""The report of `make lint` on a secret in a file; the repository's own run is in `make lint`."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

KEY = "AKIA" + "QYLPMN5HFIQR7XYA"  # in two pieces, or it would be found here


def test_a_secret_is_found_and_a_known_one_is_not(tmp_path: Path) -> None:
    for text, code in ((f"key = '{KEY}'\n", 1), ("key = 'of-the-house'\n", 0)):
        file = tmp_path / "settings.ini"
        file.write_text(text)
        found = subprocess.run(
            [ROOT / ".venv" / "bin" / "detect-secrets-hook", "--no-verify", file],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert found.returncode == code, found.stdout + found.stderr


def run(directory: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def find(directory: Path) -> "subprocess.CompletedProcess[str]":
    return run(directory, "sh", str(ROOT / ".ci" / "find_secrets.sh"), sys.executable)


def test_a_known_secret_may_move_and_nothing_is_written(tmp_path: Path) -> None:
    file, baseline = tmp_path / "settings.ini", tmp_path / ".secrets.baseline"
    file.write_text(f"key = '{KEY}'\n")
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, "git", "add", ".")
    scan = run(tmp_path, sys.executable, "-m", "detect_secrets", "scan", "--no-verify")
    baseline.write_text(scan.stdout)
    run(tmp_path, "git", "add", ".")
    baseline.write_text(scan.stdout + "\n")  # changed, and not staged
    before = baseline.read_bytes()
    file.write_text("\n" * 7 + file.read_text())
    known = find(tmp_path)
    assert (known.returncode, known.stdout, baseline.read_bytes()) == (0, "", before), known
    file.write_text(file.read_text() + f"other = '{KEY[:-1]}Z'\n")
    new = find(tmp_path)
    assert new.returncode == 1
    assert "settings.ini:9" in new.stdout
    assert baseline.read_bytes() == before


def test_make_lint_searches_so() -> None:
    assert "sh .ci/find_secrets.sh $(venv_python)" in (ROOT / "Makefile").read_text()
