"""Conversion of a whole file into the files of its batches: requests in parts, and their rows.

The rows are kept beside the requests, so that each output can be returned with the columns of its row;
omitted rows are among them, with the reason.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import orjson

from app.ui.bulk.mapping import RowError
from app.ui.bulk.table import Row, Table, add_columns

MAX_SHOWN_ERRORS = 100  # errors that are shown; all are counted

ToLine = Callable[[Row], tuple[str, bytes]]


class LineError(NamedTuple):
    line: int
    message: str


@dataclass(slots=True)
class Part:
    """The requests of one batch, and their rows; sizes in bytes."""

    path: Path
    rows_path: Path
    lines: int = 0
    size: int = 0
    left_out: int = 0
    rows_size: int = 0


@dataclass(slots=True)
class Conversion:
    parts: list[Part] = field(default_factory=list)
    rows: int = 0
    left_out: int = 0
    errors: list[LineError] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.rows - self.left_out

    def leave_out(self, row: Row, message: str) -> None:
        self.left_out += 1
        if len(self.errors) < MAX_SHOWN_ERRORS:
            self.errors.append(LineError(row.line, message))


@dataclass(slots=True, frozen=True)
class Bounds:
    """Bounds of one part; sizes in bytes."""

    lines: int = 50_000
    size: int = 100_000_000
    line_size: int = 2_000_000


def convert(
    file: BinaryIO, table: Table, to_line: ToLine, directory: Path, bounds: Bounds
) -> Conversion:
    """Read all rows once; invalid rows are omitted and reported. Raises SourceError.

    Blocks; memory holds one row of the file, and 16 to 32 bytes of each id.
    """
    done = Conversion(columns=list(table.columns))
    seen = SeenTexts()
    with _Parts(done.parts, directory, bounds) as parts:
        for row in table.rows(file):
            done.rows += 1
            try:
                line = _checked(row, to_line, seen, bounds.line_size)
            except RowError as error:
                done.leave_out(row, str(error))
                parts.leave_out(row, str(error))
                continue
            parts.write(line, row)
            if table.kind == "jsonl":
                add_columns(done.columns, row)
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


def _checked(row: Row, to_line: ToLine, seen: "SeenTexts", max_size: int) -> bytes:
    if row.error:
        raise RowError(row.error)
    identifier, line = to_line(row)
    if len(line) > max_size:
        raise RowError(f"The request has {len(line):,} bytes, more than {max_size:,}.")
    if not seen.add(identifier):
        raise RowError(f"The id “{identifier[:60]}” is that of an earlier line.")
    return line


def _kept(row: Row, values: dict[str, Any], error: str = "") -> bytes:
    kept = {"line": row.line, "columns": values} | ({"error": error} if error else {})
    try:
        return orjson.dumps(kept, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, ValueError):  # nested too deep to be written
        return orjson.dumps({**kept, "columns": {}}, option=orjson.OPT_APPEND_NEWLINE)


class _Parts:
    """Writes requests and rows, and begins another part when one is full."""

    def __init__(self, parts: list[Part], directory: Path, bounds: Bounds) -> None:
        self._parts = parts
        self._directory = directory
        self._bounds = bounds
        self._files: tuple[BinaryIO, BinaryIO] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files or ():
            file.close()

    def write(self, line: bytes, row: Row) -> None:
        kept = _kept(row, row.values)
        part, lines, rows = self._part(len(line), len(kept))
        lines.write(line)
        part.lines += 1
        part.size += len(line)
        rows.write(kept)
        part.rows_size += len(kept)

    def leave_out(self, row: Row, error: str) -> None:
        """Store only a row; after very many of them, without its values."""
        part, _, rows = self._part(0, 0)
        is_full = part.rows_size > self._bounds.size
        kept = _kept(row, {} if is_full else row.values, error)
        rows.write(kept)
        part.rows_size += len(kept)
        part.left_out += 1

    def _part(self, size: int, rows_size: int) -> tuple[Part, BinaryIO, BinaryIO]:
        if self._files is None or (size and self._is_full(size, rows_size)):
            self.__exit__()
            folder, number = self._directory, len(self._parts) + 1
            part = Part(folder / f"part-{number}.jsonl", folder / f"rows-{number}.jsonl")
            self._parts.append(part)
            self._files = part.path.open("wb"), part.rows_path.open("wb")
        return self._parts[-1], *self._files

    def _is_full(self, size: int, rows_size: int) -> bool:
        part, bounds = self._parts[-1], self._bounds
        return part.lines > 0 and (
            part.lines >= bounds.lines
            or part.size + size > bounds.size
            or part.rows_size + rows_size > bounds.size
        )


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
