"""Rows of an uploaded file: JSON lines, or a table with commas, semicolons, tabs or bars (RFC 4180).

Rows come one by one. An error in one row is reported with its line, and the next one follows; an error
that makes the whole file useless raises SourceError.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import BinaryIO, Literal

import orjson

from app.ui.bulk.delimited import DELIMITERS, Row, csv_rows, header, sniff_delimiter
from app.ui.bulk.text import (
    HEAD_BYTES,
    Encoding,
    SourceError,
    head_text,
    read_lines,
    sniff_encoding,
)

Kind = Literal["jsonl", "csv"]

MAX_COLUMNS = 256
MAX_NAME = 128  # characters of a column's name
TEXT_COLUMN = "text"  # of JSON lines that are plain texts
SAMPLE_ROWS = 10
_SNIFFED_ROWS = 100


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
        if self.kind == "jsonl":
            return _json_rows(lines)
        return csv_rows(lines, self.delimiter, MAX_COLUMNS, MAX_NAME)


def read_table(file: BinaryIO, filename: str, delimiter: str = "") -> Table:
    """Detect the format by the name's ending, the file's head and rows. Raises SourceError."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    encoding = sniff_encoding(head)
    text, suffix = head_text(head, encoding), PurePath(filename).suffix.lower()
    kind = _sniff_kind(text, suffix)
    if kind == "csv" and delimiter not in DELIMITERS:
        delimiter = sniff_delimiter(text, suffix)
    table = Table(kind, encoding, delimiter, (), ())
    columns: list[str] = []
    if kind == "csv":
        columns = header(read_lines(file, encoding), delimiter, MAX_COLUMNS, MAX_NAME)
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
