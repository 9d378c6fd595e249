"""Conversion of a whole file: each row is made into a request before any is sent.

The rows are written to a file of their own, which the job keeps (`kept_rows`); omitted rows are among
them, with the reason.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import orjson

from app.ui.bulk.delimited import Row
from app.ui.bulk.kept_rows import kept_line
from app.ui.bulk.mapping import RowError
from app.ui.bulk.table import Table, add_columns

MAX_SHOWN_ERRORS = 100  # errors that are shown; all are counted
MAX_REQUEST = 1_900_000  # bytes; the API's own bound is LLM_MAX_BODY_BYTES

ToRequest = Callable[[Row], tuple[str, dict[str, Any]]]


class LineError(NamedTuple):
    line: int
    message: str


@dataclass(slots=True)
class Conversion:
    rows: int = 0
    left_out: int = 0
    errors: list[LineError] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    size: int = 0  # bytes that were written

    @property
    def requests(self) -> int:
        return self.rows - self.left_out

    def leave_out(self, row: Row, message: str) -> None:
        self.left_out += 1
        if len(self.errors) < MAX_SHOWN_ERRORS:
            self.errors.append(LineError(row.line, message))


def convert(file: BinaryIO, table: Table, to_request: ToRequest, output: BinaryIO) -> Conversion:
    """Read all rows once, and write them to `output`; invalid ones are omitted. Raises SourceError.

    Blocks; memory holds one row of the file, and 16 to 32 bytes of each key.
    """
    done = Conversion(columns=list(table.columns))
    seen = SeenTexts()
    for row in table.rows(file):
        done.rows += 1
        problem = _problem(row, to_request, seen)
        if problem:
            done.leave_out(row, problem)
        elif table.kind == "jsonl":
            add_columns(done.columns, row)
        done.size += output.write(kept_line(row, table.kind, problem))
    return done


def check_rows(file: BinaryIO, table: Table) -> Conversion:
    """Read all rows, and write no requests. Raises SourceError. Blocks."""
    found = Conversion(columns=list(table.columns))
    for row in table.rows(file):
        found.rows += 1
        if row.error:
            found.leave_out(row, row.error)
        elif table.kind == "jsonl":
            add_columns(found.columns, row)
    return found


def _problem(row: Row, to_request: ToRequest, seen: "SeenTexts") -> str:
    """The reason why a row cannot be sent; empty if it can."""
    if row.error:
        return row.error
    try:
        key, request = to_request(row)
        size = len(orjson.dumps(request))
    except RowError as error:
        return str(error)
    except (TypeError, ValueError):  # orjson reads deeper nesting than it writes
        return "The row is nested too deep."
    if size > MAX_REQUEST:
        return f"The request has {size:,} bytes, more than {MAX_REQUEST:,}."
    return "" if seen.add(key) else f"The id “{key[:60]}” is that of an earlier line."


class SeenTexts:
    """A set of texts by 64 bits of each (Python's salted hash), in 16 to 32 bytes a text.

    Among a million texts, a false match occurs once in thirty million files.
    """

    def __init__(self) -> None:
        self._slots = array("Q", [0]) * 4096
        self._count = 0

    def add(self, text: str) -> bool:
        mark = hash(text) & 0xFFFF_FFFF_FFFF_FFFF or 1
        if not self._insert(mark):
            return False
        self._count += 1
        if self._count * 2 > len(self._slots):
            old, self._slots = self._slots, array("Q", [0]) * (2 * len(self._slots))
            for one in old:
                if one:
                    self._insert(one)
        return True

    def _insert(self, mark: int) -> bool:
        slots = self._slots
        size = len(slots)
        place = mark % size
        while (found := slots[place]) != mark:
            if not found:
                slots[place] = mark
                return True
            place = (place + 1) % size
        return False
