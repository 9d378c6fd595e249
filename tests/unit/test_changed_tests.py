"""`.ci/changed_tests.sh`: which tests `make check` runs."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "changed_tests.sh"
TESTS = [
    "tests/integration/queue/test_claims.py",
    "tests/integration/api/test_access.py",
    "tests/integration/api/openai/test_chat.py",
    "tests/integration/core/test_migrations.py",
    "tests/unit/test_ids.py",
]


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository on a branch of `main`."""
    for name in TESTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=Tests")
    git(tmp_path, "switch", "--quiet", "--create=work")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        ("app/queue/sql.py", ["tests/integration/queue"]),
        ("app/api/openai/serving.py", ["tests/integration/api/openai"]),
        ("app/api/tgi/serving.py", ["tests/integration/api"]),
        ("app/access.py", ["tests/integration/api/test_access.py"]),
        ("app/ui/main.py", []),
        ("tests/integration/queue/test_claims.py", ["tests/integration/queue/test_claims.py"]),
        ("db/versions/0016_more.py", ["tests/integration/core/test_migrations.py"]),
        ("README.md", []),
    ],
)
@pytest.mark.parametrize("is_committed", [True, False])
def test_what_is_changed_is_tested(
    checkout: Path, changed: str, concerned: list[str], is_committed: bool
) -> None:
    (checkout / changed).parent.mkdir(parents=True, exist_ok=True)
    (checkout / changed).write_text("changed")
    if is_committed:
        git(checkout, "add", ".")
        git(checkout, "commit", "--quiet", "--message=Work")
    output = subprocess.check_output(["sh", SCRIPT], cwd=checkout, text=True)
    assert output.split() == [*concerned, "tests/unit"]
