"""Rows of data: from iterables, data frames and files, read as they are needed."""

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.delimited import csv_rows, sniff_delimiter
from llm_api_client.jobs.parquet import parquet_rows, parquet_total
from llm_api_client.jobs.text import (
    HEAD_BYTES,
    Encoding,
    SourceError,
    head_text,
    read_lines,
    sniff_encoding,
)

# Rows of a data frame or a Parquet file that are in memory at the same time.
_CHUNK = 1000
_ANY_NUMBER = 1 << 31  # of columns


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read."""

    reason: str


@dataclass(frozen=True)
class Source:
    """Rows, and a number that differs if the data does: of rows, or of a file's bytes."""

    rows: Iterator[Any]
    total: int | None
    size: int | None


def open_source(rows: Any) -> Source:
    """Rows of any kind.

    Args:
        rows: an iterable of mappings or texts; a data frame of pandas or polars; a data set of Hugging
            Face; the path of a JSONL, CSV, TSV or Parquet file.

    Raises:
        ConfigurationError: the kind is not supported, or the file cannot be opened.
    """
    if isinstance(rows, (str, os.PathLike)):
        return _open_file(Path(rows))
    library = type(rows).__module__.partition(".")[0]
    if library == "pandas":
        return Source(_pandas_rows(rows), len(rows), len(rows))
    if library == "polars":
        frame = rows.collect() if hasattr(rows, "collect") else rows
        return Source(frame.iter_rows(named=True), frame.height, frame.height)
    if isinstance(rows, Iterable) and not isinstance(rows, (bytes, dict)):
        total = len(rows) if isinstance(rows, Sized) else None
        return Source(iter(rows), total, total)
    raise ConfigurationError(
        f"Rows of type {type(rows).__name__} are not supported: give an iterable, a data frame or a path."
    )


def _pandas_rows(frame: Any) -> Iterator[dict[str, Any]]:
    for start in range(0, len(frame), _CHUNK):
        yield from frame.iloc[start : start + _CHUNK].to_dict("records")


def _open_file(path: Path) -> Source:
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {
        ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv_rows, ".tsv": _csv_rows,
        ".parquet": parquet_rows,
    }  # fmt: skip
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(f"{path} is none of {', '.join(readers)}.")
    try:
        size = path.stat().st_size
        path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    total = parquet_total(path) if path.suffix.lower() == ".parquet" else None
    return Source(_explained(path, reader(path)), total, size)


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(path)[0], 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                yield BadRow(f"line {number} is not JSON: {error}")


def _csv_rows(path: Path) -> Iterator[Any]:
    """Rows of a table. A column without a name (such as pandas' index) is `column 1` by its place."""
    lines, head = _lines(path)
    if not head:
        return
    delimiter = sniff_delimiter(head, path.suffix.lower())
    for row in csv_rows(lines, delimiter, _ANY_NUMBER, _ANY_NUMBER):
        yield BadRow(f"line {row.line}: {row.error}") if row.error else row.values


def _lines(path: Path) -> tuple[Iterator[str], str]:
    """The lines of a file, and the text of its head."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.strip():
        return iter(()), ""
    encoding = sniff_encoding(head)
    return _read(path, encoding), head_text(head, encoding)


def _read(path: Path, encoding: Encoding) -> Iterator[str]:
    with path.open("rb") as file:
        yield from read_lines(file, encoding)


def _explained(path: Path, rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except SourceError as error:
        raise ConfigurationError(f"{path}: {error}") from error
