"""Rows of a table with commas, semicolons, tabs or bars (RFC 4180), one by one.

An error in one row is reported with its line, and the next one follows; an error that makes the whole file useless
raises SourceError. `client/llm_api_client/jobs` has the same file, and that of `text`: neither the page nor the client
installs the other, and both read a table alike. A unit test compares them.
"""

import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.ui.bulk.text import MAX_LINE, SourceError, too_long

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
# The module's own bound, 131,072, would refuse long prompts. Ours counts whole records, and is less.
_MAX_CELL = 2 * MAX_LINE


@dataclass(slots=True, frozen=True)
class Row:
    """A row; `line` is its first line, from 1. With an `error`, the values are incomplete."""

    line: int
    values: dict[str, Any]
    error: str = ""


def sniff_delimiter(text: str, suffix: str) -> str:
    """The delimiter that gives the first records the most equal numbers of cells; else a comma.

    `text` is the file's head. A file named `.tsv` that has tabs is separated by them.
    """
    if suffix == ".tsv" and "\t" in text:
        return "\t"

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


def csv_rows(
    lines: Iterator[str], delimiter: str, max_columns: int, max_name: int
) -> Iterator[Row]:
    """The rows beneath the names of the columns. Raises SourceError, perhaps in the middle."""
    records = _records(lines, delimiter)
    columns = _header(records, max_columns, max_name)
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

    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))
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


def header(lines: Iterator[str], delimiter: str, max_columns: int, max_name: int) -> list[str]:
    """The names of the columns; one without a name is `column 1` by its place. Raises SourceError."""
    return _header(_records(lines, delimiter), max_columns, max_name)


def _header(
    records: Iterator[tuple[int, list[str], str]], max_columns: int, max_name: int
) -> list[str]:
    line, cells, error = next(records, (1, [], "The file has no row."))
    if error:
        raise SourceError(f"Line {line}, the names of the columns: {error}")
    if len(cells) > max_columns:
        raise SourceError(f"The file has {len(cells):,} columns; at most {max_columns} are read.")
    names: dict[str, int] = {}
    for place, cell in enumerate(cells, 1):
        name = cell.strip() or f"column {place}"
        if len(name) > max_name:
            raise SourceError(
                f"The name of column {place} has more than {max_name} characters. The first row "
                "must have the names of the columns."
            )
        if name in names:
            raise SourceError(
                f"Columns {names[name]} and {place} have the same name, “{name}”. Rename one."
            )
        names[name] = place
    return list(names)
