"""Answers beside their rows, as JSON lines or CSV, one at a time."""

import csv
import io
import re
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.ui.bulk.json_lines import to_line
from app.ui.bulk.mapping import text_of

Status = Literal["completed", "failed", "left_out", "pending"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # without it, Excel reads UTF-8 in the country's old encoding
_ANSWER_COLUMNS = (
    "output", "status", "error", "model", "finish_reason", "prompt_tokens", "completion_tokens",
    "result_id",
)  # fmt: skip
# https://owasp.org/www-community/attacks/CSV_Injection, with the wide forms of its signs.
_SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20"
_FORMULA = re.compile(f"^[ \u00a0]*[\t\r\n{_SIGNS}]")
# In countries that separate cells by semicolons, a quotation mark within a cell means nothing: the
# text is divided at each of these.
_LATER_FORMULA = re.compile(f'([;\t\r\n])([ \u00a0"]*[{_SIGNS}][^;\t\r\n]*)')
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_CHUNK = 65_536  # bytes that are sent at once


@dataclass(slots=True, frozen=True)
class Answer:
    status: Status = "pending"
    output: Any = ""  # a text; of a score a number, or one of each document
    error_code: str = ""
    error_message: str = ""
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    result_id: str = ""


@dataclass(slots=True, frozen=True)
class AnsweredRow:
    line: int
    columns: dict[str, Any]
    answer: Answer


def answer_of(row: Mapping[str, Any]) -> Answer:
    """The answer of a job's row, as the API returns it: pending, ended, or with a deleted result."""
    result = row["result"]
    if result is None:
        is_over = row["state"] in ("completed", "failed")
        return Answer(
            row["state"] or "pending",
            error_code="result_deleted" if is_over else "",
            error_message="The result has been deleted." if is_over else "",
            result_id=row["result_id"] or "",
        )
    error, usage = result["error"] or {}, result["usage"] or {}
    return Answer(
        row["state"],
        _output_of(result),
        error.get("code", ""),
        error.get("message", ""),
        result["model_name"],
        result["finish_reason"] or "",
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        row["result_id"],
    )


def _output_of(result: Mapping[str, Any]) -> Any:
    output = result["result"]
    if result.get("kind") != "score" or not output:
        return text_of(output)
    return output["scores"] if "scores" in output else output["score"]


async def to_jsonl(rows: AsyncIterable[AnsweredRow]) -> AsyncGenerator[bytes, None]:
    buffer = bytearray()
    async for row in rows:
        answer = row.answer
        error = {"code": answer.error_code, "message": answer.error_message}
        buffer += to_line(
            {
                "line": row.line,
                "input": row.columns,
                "output": answer.output if answer.status == "completed" else None,
                "status": answer.status,
                "error": error if answer.error_message else None,
                "model": answer.model or None,
                "finish_reason": answer.finish_reason or None,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "result_id": answer.result_id or None,
            }
        )
        if len(buffer) >= _CHUNK:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


async def to_csv(
    rows: AsyncIterable[AnsweredRow], columns: Sequence[str]
) -> AsyncGenerator[bytes, None]:
    """A table for spreadsheets: the file's columns, then the answer's; no cell is a formula."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)  # RFC 4180: commas, CRLF
    names = [_free_name("line", columns), *columns]
    names += [_free_name(name, columns) for name in _ANSWER_COLUMNS]
    writer.writerow([escape_formula(name) for name in names])
    yield BYTE_ORDER_MARK
    async for row in rows:
        answer = row.answer
        error = ": ".join(filter(None, (answer.error_code, answer.error_message)))
        cells: list[Any] = [row.columns.get(column) for column in columns]
        cells += [
            text_of(answer.output), answer.status, error, answer.model, answer.finish_reason,
            answer.prompt_tokens, answer.completion_tokens, answer.result_id,
        ]  # fmt: skip
        writer.writerow([row.line, *(escape_formula(text_of(cell)) for cell in cells)])
        if buffer.tell() >= _CHUNK:
            yield _taken(buffer)
    if buffer.tell():
        yield _taken(buffer)


def escape_formula(text: str) -> str:
    """The text of a cell in which no spreadsheet program finds a formula: `'` is put before it.

    The same behind each semicolon, tab and line end. A number with a sign is a number, and stays.
    """
    is_formula = _FORMULA.match(text) and not _NUMBER.fullmatch(text)
    text = _LATER_FORMULA.sub(_escape_later, text)
    return "'" + text if is_formula else text


def _escape_later(found: "re.Match[str]") -> str:
    separator, rest = found.groups()
    is_number = _NUMBER.fullmatch(rest.strip(' "\u00a0'))
    return separator + rest if is_number else f"{separator}'{rest}"


def _free_name(name: str, columns: Sequence[str]) -> str:
    while name in columns:
        name = f"answer_{name}"
    return name


def _taken(buffer: io.StringIO) -> bytes:
    content = buffer.getvalue().encode()
    buffer.seek(0)
    buffer.truncate()
    return content
