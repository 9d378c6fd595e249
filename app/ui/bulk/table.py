"""Rows of an uploaded file: JSON lines, or a table with commas, semicolons, tabs or bars (RFC 4180).

Rows come one by one. An error in one row is reported with its line, and the next one follows; an error
that makes the whole file useless raises SourceError.
"""

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO, Literal

import orjson

from app.ui.bulk.text import (
    HEAD_BYTES,
    MAX_LINE,
    Encoding,
    SourceError,
    read_lines,
    sniff_encoding,
    too_long,
)

Kind = Literal["jsonl", "csv"]

MAX_COLUMNS = 256
MAX_NAME = 128  # characters of a column's name
TEXT_COLUMN = "text"  # of JSON lines that are plain texts
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
SAMPLE_ROWS = 10
_SNIFFED_ROWS = 100
# The module's own bound, 131,072, would refuse long prompts. Ours counts whole records, and is less.
csv.field_size_limit(2 * MAX_LINE)


@dataclass(slots=True, frozen=True)
class Row:
    """A row; `line` is its first line, from 1. With an `error`, the values are incomplete."""

    line: int
    values: dict[str, Any]
    error: str = ""


@dataclass(slots=True, frozen=True)
class Table:
    """The format of a file. `columns` of JSON lines are those of the first rows."""

    kind: Kind
    encoding: Encoding
    delimiter: str
    columns: Sequence[str]
    sample: Sequence[Row]

    @property
    def is_batch(self) -> bool:
        """The lines are requests in the format of OpenAI's batches."""
        return {"custom_id", "url", "body"} <= set(self.columns) and self.kind == "jsonl"

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        """All rows, from the file's beginning. Raises SourceError, perhaps in the middle."""
        lines = read_lines(file, self.encoding)
        return _json_rows(lines) if self.kind == "jsonl" else _csv_rows(lines, self.delimiter)


def read_table(file: BinaryIO, filename: str, delimiter: str = "") -> Table:
    """Detect the format by the name's ending, the file's head and rows. Raises SourceError."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    encoding = sniff_encoding(head)
    text = head.decode(encoding.codec, "ignore")
    if encoding.has_old_newlines:
        text = text.replace("\r", "\n")
    kind = _sniff_kind(text, PurePath(filename).suffix.lower())
    if kind == "csv" and delimiter not in DELIMITERS:
        delimiter = _sniff_delimiter(text)
    table = Table(kind, encoding, delimiter, (), ())
    columns = [] if kind == "jsonl" else _header(_records(read_lines(file, encoding), delimiter))
    file.seek(0)
    sample: list[Row] = []
    for row in itertools.islice(table.rows(file), _SNIFFED_ROWS):
        if len(sample) < SAMPLE_ROWS:  # a row may have millions of characters
            sample.append(row)
        if kind == "jsonl":
            add_columns(columns, row)
    if not sample:
        raise SourceError("The file has a row of column names, and no row beneath it.")
    if not columns:
        reason = sample[0].error or "The object has no members."
        raise SourceError(f"Line {sample[0].line}: {reason}")
    return Table(kind, encoding, delimiter, columns, sample)


def add_columns(columns: list[str], row: Row) -> None:
    """Add the names of a row's members, within the bounds of columns and names."""
    if len(columns) == MAX_COLUMNS:
        return
    # As sets: rows of hundreds of members would be compared with hundreds of names each.
    new = row.values.keys() - set(columns)
    if not new:
        return
    for name in row.values:
        if name in new and len(columns) < MAX_COLUMNS and len(name) <= MAX_NAME:
            columns.append(name)


def _sniff_kind(text: str, suffix: str) -> Kind:
    if suffix in (".csv", ".tsv"):
        return "csv"
    start = text.lstrip()[:1]
    if start == "[":
        raise SourceError(
            "The file is one JSON list. Write each of its objects on a line of its own "
            "(`jq -c '.[]' file.json > file.jsonl`) and upload that."
        )
    if suffix in (".jsonl", ".ndjson", ".json") or start == "{":
        return "jsonl"
    return "csv"


def _sniff_delimiter(text: str) -> str:
    """The delimiter that gives the first records the most equal numbers of cells; else a comma."""

    def score(delimiter: str) -> tuple[float, int]:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        try:
            counts = [len(record) for record in itertools.islice(reader, 50) if record]
        except csv.Error:
            return 0.0, 1
        if len(counts) > 2:
            counts.pop()  # the head may end in its middle
        is_table = counts and counts[0] > 1
        return (counts.count(counts[0]) / len(counts), counts[0]) if is_table else (0.0, 1)

    return max(DELIMITERS, key=score)  # of equal ones the first: the comma


def _json_rows(lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            words = f"This is no valid JSON: {error.msg} (character {error.pos + 1})."
            yield Row(number, {}, words)
            continue
        if isinstance(value, str):
            value = {TEXT_COLUMN: value}
        if not isinstance(value, dict):
            yield Row(number, {}, "This must be a JSON object, or a text in quotation marks.")
        elif len(value) > MAX_COLUMNS:
            yield Row(number, {}, f"This has more than {MAX_COLUMNS} members.")
        else:
            yield Row(number, value)


def _csv_rows(lines: Iterator[str], delimiter: str) -> Iterator[Row]:
    records = _records(lines, delimiter)
    columns = _header(records)
    for line, cells, error in records:
        if error:
            yield Row(line, {}, error)
        elif any(cells[len(columns) :]):  # behind commas at a line's end there is nothing
            yield Row(
                line,
                dict(zip(columns, cells, strict=False)),
                f"This has {len(cells)} cells, and there are {len(columns)} columns. A cell with "
                f"the separator ({DELIMITERS[delimiter]}) in it needs quotation marks around it.",
            )
        else:
            cells += [""] * (len(columns) - len(cells))
            yield Row(line, dict(zip(columns, cells, strict=False)))


def _records(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str], str]]:
    """The first line of each record, its cells, and its error."""
    first, size = 1, 0

    def bounded() -> Iterator[str]:
        nonlocal size
        for line in lines:
            size += len(line)
            if size > MAX_LINE:
                raise too_long(first)
            yield line

    reader = csv.reader(bounded(), delimiter=delimiter, strict=True)
    while True:
        first, size = reader.line_num + 1, 0
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise SourceError(
                    f"Line {first:,}: a cell in quotation marks begins here, or in this record, and "
                    "never ends. Write a quotation mark inside a cell twice."
                ) from error
            yield first, [], _explain(error)
            continue
        if cells:
            yield first, cells, ""


def _explain(error: csv.Error) -> str:
    if "expected after" in str(error):
        return (
            "Text follows the quotation mark that ends a cell. Write a quotation mark inside a "
            "cell twice, and the whole cell in quotation marks."
        )
    if "new-line" in str(error):
        return "There is a carriage return inside a cell. Put the cell in quotation marks."
    return f"This is no row of the table: {error}."


def _header(records: Iterator[tuple[int, list[str], str]]) -> list[str]:
    line, cells, error = next(records, (1, [], "The file has no row."))
    if error:
        raise SourceError(f"Line {line}, the names of the columns: {error}")
    if len(cells) > MAX_COLUMNS:
        raise SourceError(f"The file has {len(cells):,} columns; at most {MAX_COLUMNS} are read.")
    names: dict[str, int] = {}
    for place, cell in enumerate(cells, 1):
        name = cell.strip() or f"column {place}"
        if len(name) > MAX_NAME:
            raise SourceError(
                f"The name of column {place} has more than {MAX_NAME} characters. The first row "
                "must have the names of the columns."
            )
        if name in names:
            raise SourceError(
                f"Columns {names[name]} and {place} have the same name, “{name}”. Rename one."
            )
        names[name] = place
    return list(names)
