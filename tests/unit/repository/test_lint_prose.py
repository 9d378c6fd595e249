"""The prose linter of `make lint`: its findings by kind of file, its lines, its exemptions."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.lint_prose import findings, read_style

STYLE = read_style()

PYTHON = '''"""What every request passes first."""

NAME = "told"  # a key, of one word


def read() -> str:
    """Text of a result.

    Raises LookupError where nobody
    stored it.
    """
    # The client is told.
    return f"The worker says {told['says']} of `tell`"
'''


def found(text: str, suffix: str) -> list[str]:
    return [
        finding.split(": ")[0] + " " + finding.split('"')[1]
        for finding in findings(text, suffix, STYLE)
    ]


def test_python_is_read_by_docstrings_comments_and_literals() -> None:
    assert found(PYTHON, ".py") == ["1 What", "1 What", "9 nobody", "12 told", "13 says"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The API returns the id, and the client\nis told.", ["2 told"]),
        ("Who\nasks is known.", ["1 Who", "1 Who asks"]),
        ("It goes. Of these, two stay.", ["1 Of"]),
        ("One of these; what fits? What fits?", []),
        ("## Where it goes\n\n### How to stop it\n", ["1 Where"]),
        ("*What fits?* is a label.\n\n<!-- P5 -->\n| told |\n<!-- end P5 -->\nTold.", ["6 Told"]),
        ("Run `tell`, [tell](tell.md).\n\n```sh\ntell\n```\n\nIt tells.", ["1 tell", "7 tells"]),
    ],
)
def test_markdown_is_read_beside_its_code(text: str, expected: list[str]) -> None:
    assert found(text, ".md") == expected


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ('<p class="told" title="{{ told }}">Tells</p>', ".html"),
        ("said: 1 # it says\n", ".yaml"),
        ("let told = 1; // it says\n", ".js"),
        ("told: { } /* it says */\n", ".css"),
    ],
)
def test_other_files_are_read_by_their_texts(text: str, suffix: str) -> None:
    assert len(found(text, suffix)) == 1


def test_an_advice_names_the_word_to_write() -> None:
    assert findings("It does that for ever.", ".md", STYLE) == [
        '1: "for ever": indefinitely, or never ends'
    ]


def test_skipped_files_are_not_read() -> None:
    assert not STYLE.covers(Path("docs/settings.md"))
    assert STYLE.covers(Path("tools/other.py"))


def test_the_command_fails_where_it_finds_something(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text, code in (("The client is told.", 1), ("The client is notified.", 0)):
        page.write_text(text)
        run = subprocess.run(
            [sys.executable, ROOT / "tools" / "lint_prose.py", page],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert run.returncode == code, run.stderr
        assert (f"{page}:1: " in run.stdout) == bool(code)
