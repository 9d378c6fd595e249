"""Outputs beside their rows, as JSON lines or CSV, one at a time.

A batch's output and error files are in the order of its lines, and so are the kept rows: a streaming
merge joins them.
"""

import csv
import io
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

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
MAX_LINE = 64_000_000  # bytes; an output with the logprobs of all its tokens has some millions
_CHUNK = 65_536  # bytes that are sent at once


@dataclass(slots=True, frozen=True)
class Answer:
    custom_id: str = ""
    status: Status = "pending"
    output: str = ""
    error_code: str = ""
    error_message: str = ""
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    result_id: str = ""


_PENDING = Answer()


@dataclass(slots=True, frozen=True)
class AnsweredRow:
    line: int
    columns: dict[str, Any]
    answer: Answer


class LineTooLongError(ValueError):
    """A line has more than MAX_LINE bytes."""


async def split_lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    rest = bytearray()  # grows in place: a long line is not copied with each piece
    async for piece in pieces:
        first, *others = piece.split(b"\n")
        rest += first
        for line in others:
            yield bytes(rest)
            rest[:] = line
        if len(rest) > MAX_LINE:
            raise LineTooLongError(f"a line has more than {MAX_LINE:,} bytes")
    if rest:
        yield bytes(rest)


def read_answer(line: bytes) -> tuple[int, Answer]:
    """Read a line of an output or error file: its number in the batch's file, and the answer."""
    outcome = orjson.loads(line)
    number = int(outcome["id"].rpartition("_")[2])
    response = outcome.get("response") or {}
    body = response.get("body") or {}
    error = outcome.get("error") or body.get("error")
    common = {"custom_id": outcome["custom_id"], "result_id": response.get("request_id") or ""}
    if error:
        return number, Answer(
            **common,
            status="failed",
            error_code=str(error.get("code") or error.get("type") or ""),
            error_message=str(error.get("message") or ""),
        )
    usage = body.get("usage") or {}
    choices = body.get("choices") or [{}]
    return number, Answer(
        **common,
        status="completed",
        output=output_of(body),
        model=body.get("model") or "",
        finish_reason=choices[0].get("finish_reason") or body.get("status") or "",
        prompt_tokens=usage.get("prompt_tokens", usage.get("input_tokens")),
        completion_tokens=usage.get("completion_tokens", usage.get("output_tokens")),
    )


def output_of(body: dict[str, Any]) -> str:
    """The text of a response of any of the three endpoints; of several choices, a JSON list."""
    if "output" in body:  # a response
        return "".join(
            content.get("text", "")
            for item in body["output"]
            for content in item.get("content") or ()
            if content.get("type") == "output_text"
        )
    texts = [_text_of_choice(choice) for choice in body.get("choices") or ()]
    return texts[0] if len(texts) == 1 else orjson.dumps(texts).decode()


def _text_of_choice(choice: dict[str, Any]) -> str:
    if "message" not in choice:
        return choice.get("text") or ""
    message = choice["message"]
    return message.get("content") or text_of(message.get("tool_calls"))


async def answers_of(
    lines: int,
    output: AsyncIterator[bytes] | None = None,
    errors: AsyncIterator[bytes] | None = None,
    default: Answer = _PENDING,
) -> AsyncGenerator[Answer, None]:
    """The answer of each of a batch's lines, by the lines of its files; `default` if neither has it."""
    outputs, failures = _Cursor(output), _Cursor(errors)
    for number in range(1, lines + 1):
        yield await outputs.take(number) or await failures.take(number) or default


class _Cursor:
    """Reads a file's answers in step with the batch's lines."""

    def __init__(self, lines: AsyncIterator[bytes] | None) -> None:
        self._lines = lines
        self._next = (0, _PENDING)

    async def take(self, number: int) -> Answer | None:
        while self._lines is not None and self._next[0] < number:
            line = await anext(self._lines, None)
            if line is None:
                self._lines = None
            elif line:
                self._next = read_answer(line)
        return self._next[1] if self._next[0] == number else None


async def join(
    rows: AsyncIterator[bytes], answers: AsyncIterator[Answer]
) -> AsyncIterator[AnsweredRow]:
    """Each kept row with its answer, in the order of the uploaded file."""
    async for line in rows:
        row = orjson.loads(line)
        if "error" in row:
            answer = Answer(status="left_out", error_code="left_out", error_message=row["error"])
        else:
            answer = await anext(answers, _PENDING)
        yield AnsweredRow(row["line"], row["columns"], answer)


async def without_rows(answers: AsyncIterator[Answer]) -> AsyncIterator[AnsweredRow]:
    """Only the answers, with their ids: for a batch that was not made from a table."""
    number = 0
    async for answer in answers:
        number += 1
        yield AnsweredRow(number, {"custom_id": answer.custom_id}, answer)


async def to_jsonl(rows: AsyncIterable[AnsweredRow]) -> AsyncGenerator[bytes, None]:
    buffer = bytearray()
    async for row in rows:
        answer = row.answer
        error = {"code": answer.error_code, "message": answer.error_message}
        buffer += orjson.dumps(
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
            },
            option=orjson.OPT_APPEND_NEWLINE,
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
            answer.output, answer.status, error, answer.model, answer.finish_reason,
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
