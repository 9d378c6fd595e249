"""Exported tables in spreadsheet programs that divide cells in other ways than we do."""

import re
from collections.abc import AsyncIterator

import pytest

from app.ui.bulk.results import Answer, AnsweredRow, escape_formula, to_csv

COMMAND = "=cmd|' /C calc'!A0"
TEXTS = [
    f"{before}{sign}{COMMAND[1:]}{behind}"
    for before in ("", "a;", "a\t", "a\n", "a\r\n", "a; ", 'a;"', 'a;" "', "a;\xa0", ";;", "1;-5;", "\n\n")
    for sign in ("=", "+", "-", "@", "\uff1d")
    for behind in ("", ";", '"')
]  # fmt: skip


def cells_of(content: str, separator: str) -> list[str]:
    """Cells of a program with this separator: a quotation mark counts at a cell's beginning only."""
    cells, rest = [], content
    while rest:
        quoted = re.match(r'"((?:[^"]|"")*)"', rest)
        value = quoted[1].replace('""', '"') if quoted else ""
        behind = rest[quoted.end() :] if quoted else rest
        end = re.search(f"[{separator}\r\n]", behind)
        cells.append(value + (behind[: end.start()] if end else behind))
        rest = behind[end.end() :] if end else ""
    return cells


@pytest.mark.parametrize("separator", [",", ";", "\t", ",;", ",;\t"])
@pytest.mark.parametrize("text", TEXTS)
async def test_no_cell_is_a_formula(text: str, separator: str) -> None:
    async def rows() -> AsyncIterator[AnsweredRow]:
        yield AnsweredRow(2, {text: text}, Answer("completed", text, "code", text))

    content = b"".join([piece async for piece in to_csv(rows(), [text])]).decode("utf-8-sig")
    for cell in cells_of(content, separator):
        bare = cell.strip(' "\xa0\t\r\n')
        assert not bare.startswith(("=", "+", "@", "\uff1d")), cell
        assert not bare.startswith("-") or bare == "-5", cell


@pytest.mark.parametrize(
    "text", ["a;b\n5", "x;-5;+3.5e2", "a, =1", "1;'=2", "see https://x.org/?a=1;b=2"]
)
def test_other_texts_stay(text: str) -> None:
    assert escape_formula(text) == text
