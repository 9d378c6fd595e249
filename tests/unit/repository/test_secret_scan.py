"""The report of `make lint` on a secret in a file; the repository's own run is in `make lint`."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.conftest import ROOT

KEY = "AKIA" + "QYLPMN5HFIQR7XYA"  # in two pieces, or it would be found here


@pytest.mark.trial
@pytest.mark.shard("tools")
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
    return run(directory, sys.executable, str(ROOT / "tools" / "find_secrets.py"))


def commit_with_known(directory: Path, file: Path) -> Path:
    """A repository that tracks the file, in which every secret is known; its baseline."""
    file.write_text(f"key = '{KEY}'\n")
    run(directory, "git", "init", "-q")
    run(directory, "git", "add", ".")
    scan = run(directory, sys.executable, "-m", "detect_secrets", "scan", "--no-verify")
    baseline = directory / ".secrets.baseline"
    baseline.write_text(scan.stdout)
    run(directory, "git", "add", ".")
    return baseline


@pytest.mark.trial
@pytest.mark.shard("tools")
def test_a_known_secret_may_move_and_a_new_one_is_found_each_time(tmp_path: Path) -> None:
    file = tmp_path / "settings.ini"
    baseline = commit_with_known(tmp_path, file)
    before = baseline.read_bytes()
    file.write_text("\n" * 7 + file.read_text())
    known = find(tmp_path)
    assert (known.returncode, known.stdout, baseline.read_bytes()) == (0, "", before), known
    file.write_text(file.read_text() + f"other = '{KEY[:-1]}Z'\n")
    for _ in range(2):
        new = find(tmp_path)
        assert new.returncode == 1
        assert "settings.ini:9" in new.stdout
    assert baseline.read_bytes() == before


@pytest.mark.trial
@pytest.mark.shard("tools")
def test_a_file_that_was_clean_is_searched_again_after_a_change_of_the_baseline(
    tmp_path: Path,
) -> None:
    baseline = commit_with_known(tmp_path, tmp_path / "settings.ini")
    assert find(tmp_path).returncode == 0
    known = orjson.loads(baseline.read_bytes())
    baseline.write_bytes(orjson.dumps(known | {"results": {}}))
    assert "settings.ini:1" in find(tmp_path).stdout


@pytest.mark.trial
@pytest.mark.shard("tools")
def test_the_search_has_the_reports_of_the_tool_itself(tmp_path: Path) -> None:
    """detect-secrets' own hook finds the same, with the repository's baseline."""
    names = [".env.api.dev", "app/auth/jwt_verifier.py", "docker-compose.yml"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text() + f"\nadded = '{KEY}'\n")
    (tmp_path / ".secrets.baseline").write_bytes((ROOT / ".secrets.baseline").read_bytes())
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, "git", "add", ".")
    hook = run(tmp_path, str(ROOT / ".venv" / "bin" / "detect-secrets-hook"), "--json", "--no-verify",
               "--baseline", ".secrets.baseline", *names)  # fmt: skip
    reported = {
        f"{name}:{one['line_number']}: {one['type']}"
        for name, found in orjson.loads(hook.stdout)["results"].items()
        for one in found
    }
    assert len(reported) >= len(names)
    assert {line.rpartition(": ")[0] for line in find(tmp_path).stdout.splitlines()} == reported


def test_make_lint_searches_so() -> None:
    assert "\t$(venv_python) -m tools.find_secrets\n" in (ROOT / "Makefile").read_text()
