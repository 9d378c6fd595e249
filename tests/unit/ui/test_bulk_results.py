"""Answers back in a table: as the API returns them, and harmless in a spreadsheet."""

import csv
import io
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from app.ui.bulk.delimited import Row
from app.ui.bulk.json_lines import to_line
from app.ui.bulk.kept_rows import LineTooLongError, kept_line, split_lines
from app.ui.bulk.results import Answer, AnsweredRow, answer_of, escape_formula, to_csv, to_jsonl


async def pieces_of(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def test_lines_are_one_for_each_reader() -> None:
    text = "one\x85two\u2028three\u2029four é"
    for line in (to_line([text]), kept_line(Row(1, {text: text}), "jsonl", text)):
        assert len(line.decode().splitlines()) == 1
    assert orjson.loads(to_line([text])) == [text]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_of_pieces(size: int) -> None:
    content = b"one\n\ntwo\nthree"
    assert [line async for line in split_lines(pieces_of(content, size))] == content.split(b"\n")


def row(state: str | None, **result: Any) -> dict[str, Any]:
    """A row of a job as the API returns it."""
    common = {"model_name": "demo", "finish_reason": None, "error": None, "usage": None}
    found = common | {"result": None} | result if result else None
    return {"key": "k", "result_id": state and "r", "state": state, "place": 1, "result": found}


def test_answers_of_rows() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    ended = row("completed", result="hi", finish_reason="stop", usage=usage)
    assert answer_of(ended) == Answer("completed", "hi", "", "", "demo", "stop", 3, 2, "r")
    failed = row("failed", error={"code": "c", "message": "m"})
    assert answer_of(failed) == Answer("failed", "", "c", "m", "demo", result_id="r")
    structured = row("completed", result={"documents": []})
    assert answer_of(structured).output == '{"documents":[]}'
    scores = (({"score": 0.5}, 0.5), ({"scores": [0.5, 1.0]}, [0.5, 1.0]), (None, ""))
    for result, output in scores:
        assert answer_of(row("completed", kind="score", result=result)).output == output
    assert answer_of(row("pending", finish_reason=None)).status == "pending"
    assert answer_of(row(None)) == Answer()
    deleted = answer_of(row("completed"))
    assert (deleted.status, deleted.error_code, deleted.result_id) == (
        "completed",
        "result_deleted",
        "r",
    )


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("=1+1", "'=1+1"),
        ("+CMD|' /C calc'!A0", "'+CMD|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t'=1"),
        ("\r=1", "'\r'=1"),
        ("\n=1", "'\n'=1"),
        ("  =1", "'  =1"),
        ("\uff1dHYPERLINK()", "'\uff1dHYPERLINK()"),
        ("-", "'-"),
        ("-5", "-5"),
        ("+3.25e-4", "+3.25e-4"),
        ("a=1", "a=1"),
        ("'=1", "'=1"),
        ("", ""),
        ("5", "5"),
    ],
)
def test_formulas_are_made_harmless(text: str, escaped: str) -> None:
    assert escape_formula(text) == escaped


async def test_csv() -> None:
    rows = [
        AnsweredRow(2, {"=id": "=1", "output": 'hi "a",\nb'}, Answer("completed", "=cmd()")),
        AnsweredRow(3, {"=id": None, "output": [1]}, Answer("failed", "", "code", "@why")),
    ]

    async def given() -> AsyncIterator[AnsweredRow]:
        for row in rows:
            yield row

    content = b"".join([piece async for piece in to_csv(given(), ["=id", "output"])])
    assert content.startswith(b"\xef\xbb\xbfline,")
    table = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))
    assert list(table[0])[:5] == ["line", "'=id", "output", "answer_output", "status"]
    assert table[0]["'=id"] == "'=1"
    assert table[0]["output"] == 'hi "a",\nb'
    assert table[0]["answer_output"] == "'=cmd()"
    assert (table[1]["'=id"], table[1]["output"]) == ("", "[1]")
    assert table[1]["error"] == "code: @why"


async def test_jsonl() -> None:
    async def given() -> AsyncIterator[AnsweredRow]:
        for number in range(2000):
            yield AnsweredRow(number, {"a": "=1"}, Answer("completed", "=x" * 20))
        yield AnsweredRow(9, {}, Answer())

    pieces = [piece async for piece in to_jsonl(given())]
    assert len(pieces) > 1
    lines = [orjson.loads(line) for line in b"".join(pieces).splitlines()]
    assert len(lines) == 2001
    assert (lines[0]["input"], lines[0]["output"]) == ({"a": "=1"}, "=x" * 20)
    assert (lines[-1]["output"], lines[-1]["status"], lines[-1]["error"]) == (None, "pending", None)


@pytest.mark.asyncio
async def test_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ui.bulk.kept_rows.MAX_LINE", 100)
    passed = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal passed
        yield b"a\nb" + b"c" * 50
        for _ in range(1000):
            passed += 1
            yield b"c" * 30

    lines = split_lines(pieces())
    assert await anext(lines) == b"a"
    with pytest.raises(LineTooLongError):
        await anext(lines)
    assert passed == 2
