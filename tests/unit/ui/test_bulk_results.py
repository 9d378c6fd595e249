"""Answers back in a table: joined with their rows, and harmless in a spreadsheet."""

import csv
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import orjson
import pytest

from app.batches.lines import line_to_wire
from app.ui.bulk.results import (
    Answer,
    AnsweredRow,
    LineTooLongError,
    answers_of,
    escape_formula,
    join,
    output_of,
    read_answer,
    split_lines,
    to_csv,
    to_jsonl,
    without_rows,
)

BATCH = UUID(int=5)


def chat(text: str) -> dict[str, Any]:
    return {
        "status_code": 200,
        "request_id": f"result-{text}",
        "body": {
            "model": "demo",
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        },
    }


def done(line: int, text: str) -> str:
    return line_to_wire(BATCH, line, f"id-{text}", response=chat(text))


def failed(line: int) -> str:
    return line_to_wire(BATCH, line, "x", error={"code": "batch_cancelled", "message": "Stopped."})


async def lines_of(texts: Sequence[str]) -> AsyncIterator[bytes]:
    for text in texts:
        yield text.encode()


async def pieces_of(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


async def joined(rows: Sequence[str], answers: AsyncIterator[Answer]) -> list[AnsweredRow]:
    return [row async for row in join(lines_of(rows), answers)]


def kept(line: int, error: str | None = None) -> str:
    row: dict[str, Any] = {"line": line, "columns": {"n": line}}
    return orjson.dumps(row | ({"error": error} if error else {})).decode()


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_of_pieces(size: int) -> None:
    content = b"one\n\ntwo\nthree"
    assert [line async for line in split_lines(pieces_of(content, size))] == content.split(b"\n")


async def test_answers_find_their_rows_over_parts_and_gaps() -> None:
    rows = [kept(2), kept(3, "No prompt."), kept(4), kept(7), kept(8), kept(9), kept(10)]
    stopped = Answer(status="failed", error_code="batch_failed", error_message="Why.")
    parts = [
        answers_of(3, lines_of([done(1, "a"), done(3, "c")]), lines_of([failed(2)])),
        answers_of(1),  # under way
        answers_of(2, lines_of([done(2, "f")]), None, default=stopped),
    ]
    starts = (rows[:4], rows[4:5], rows[5:])
    found = [
        row
        for some, answers in zip(starts, parts, strict=True)
        for row in await joined(some, answers)
    ]
    assert [(row.line, row.answer.status, row.answer.output) for row in found] == [
        (2, "completed", "a"),
        (3, "left_out", ""),
        (4, "failed", ""),
        (7, "completed", "c"),
        (8, "pending", ""),
        (9, "failed", ""),
        (10, "completed", "f"),
    ]
    assert found[1].answer.error_message == "No prompt."
    assert found[2].answer.error_code == "batch_cancelled"
    assert found[5].answer == stopped
    assert found[0].columns == {"n": 2}


async def test_a_batch_without_rows() -> None:
    answers = answers_of(2, lines_of([done(2, "b")]), lines_of([failed(1)]))
    found = [row async for row in without_rows(answers)]
    assert [(row.line, row.columns["custom_id"]) for row in found] == [(1, "x"), (2, "id-b")]


def test_answers_of_each_endpoint() -> None:
    assert read_answer(done(12, "hi").encode()) == (
        12,
        Answer("id-hi", "completed", "hi", "", "", "demo", "stop", 3, 2, "result-hi"),
    )
    refused = {"status_code": 404, "request_id": None, "body": {"error": {"code": None, "type": "t", "message": "m"}}}  # fmt: skip
    line = line_to_wire(BATCH, 1, "a", response=refused).encode()
    assert read_answer(line)[1] == Answer("a", "failed", "", "t", "m")
    assert output_of({"choices": [{"text": "x"}]}) == "x"
    assert output_of({"choices": [{"text": "x"}, {"text": "y"}]}) == '["x","y"]'
    called = [{"function": {"name": "f", "arguments": "{}"}}]
    assert orjson.loads(output_of({"choices": [{"message": {"tool_calls": called}}]})) == called
    content = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    output = [{"type": "reasoning"}, {"type": "message", "content": content}]
    assert output_of({"output": output}) == "ab"


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
        AnsweredRow(2, {"=id": "=1", "output": 'hi "a",\nb'}, Answer("", "completed", "=cmd()")),
        AnsweredRow(3, {"=id": None, "output": [1]}, Answer("", "failed", "", "code", "@why")),
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
            yield AnsweredRow(number, {"a": "=1"}, Answer("", "completed", "=x" * 20))
        yield AnsweredRow(9, {}, Answer())

    pieces = [piece async for piece in to_jsonl(given())]
    assert len(pieces) > 1
    lines = [orjson.loads(line) for line in b"".join(pieces).splitlines()]
    assert len(lines) == 2001
    assert (lines[0]["input"], lines[0]["output"]) == ({"a": "=1"}, "=x" * 20)
    assert (lines[-1]["output"], lines[-1]["status"], lines[-1]["error"]) == (None, "pending", None)


@pytest.mark.asyncio
async def test_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ui.bulk.results.MAX_LINE", 100)
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
