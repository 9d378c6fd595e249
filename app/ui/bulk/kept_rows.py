"""The rows of a job as a file in the API's store: the mapping, then each row of the uploaded file.

The first line has the columns and the form that maps them, so that any process can send its rows again
under the same keys. Each further line is a row: its number, its values,
and the reason if it was left out.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from app.ui.api import FILE_TIMEOUT, Api, segment
from app.ui.bulk import mapping
from app.ui.bulk.delimited import Row
from app.ui.bulk.json_lines import to_line
from app.ui.bulk.table import Kind
from app.ui.errors import RefusedError

MAX_LINE = 64_000_000  # bytes


@dataclass(slots=True, frozen=True)
class KeptRow:
    """A row of the uploaded file; with an `error`, it was left out. `key` is then empty."""

    line: int
    columns: dict[str, Any]
    error: str
    key: str
    request: dict[str, Any]


def header_line(columns: Sequence[str], form: Mapping[str, str]) -> bytes:
    return to_line({"columns": columns, "form": form})


def kept_line(row: Row, kind: Kind, error: str = "") -> bytes:
    """A row of a table as its cells; an object with its names."""
    values = {"cells": list(row.values.values())} if kind == "csv" else {"columns": row.values}
    kept = {"line": row.line, **({"error": error} if error else {})}
    try:
        return to_line(kept | values)
    except (TypeError, ValueError):  # nested too deep to be written
        return to_line(kept | {"columns": {}})


async def read_columns(api: Api, file_id: str) -> list[str]:
    """The names of the file's columns. Raises ApiError."""
    async with aclosing(_file_lines(api, file_id)) as lines:
        return list(_header(file_id, await anext(lines, b""))["columns"])


async def read_rows(api: Api, file_id: str) -> AsyncGenerator[KeptRow, None]:
    """The kept rows, each with its key and request. Raises ApiError, also for another program's file."""
    async with aclosing(_file_lines(api, file_id)) as lines:
        header = _header(file_id, await anext(lines, b""))
        columns = list(header["columns"])
        mapped = mapping.read_mapping(header["form"], columns)
        async for line in lines:
            try:
                yield _kept_row(orjson.loads(line), columns, mapped)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _no_rows(file_id) from error


def _kept_row(kept: dict[str, Any], columns: Sequence[str], mapped: mapping.Mapping) -> KeptRow:
    values = kept.get("columns")
    if values is None:
        values = dict(zip(columns, kept["cells"], strict=False))
    line, error, key = int(kept["line"]), kept.get("error", ""), ""
    request: dict[str, Any] = {}
    if not error:
        try:
            key, request = mapping.to_request(Row(line, values), mapped)
        except mapping.RowError as wrong:
            error = str(wrong)
    return KeptRow(line, values, error, key, request)


def _header(file_id: str, line: bytes) -> dict[str, Any]:
    try:
        header = orjson.loads(line)
        if not all(isinstance(one, str) for one in (*header["columns"], *header["form"].values())):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_rows(file_id) from error
    return dict(header)


def _no_rows(file_id: str) -> RefusedError:
    return RefusedError(422, "unreadable", f"The file {file_id} has no rows of a job of this page.")


async def _file_lines(api: Api, file_id: str) -> AsyncGenerator[bytes, None]:
    async with api.stream(
        "GET", f"/v1/files/{segment(file_id)}/content", timeout=FILE_TIMEOUT
    ) as response:
        try:
            async for line in split_lines(response.aiter_bytes()):
                yield line
        except LineTooLongError as error:
            raise RefusedError(
                422, "too_large", f"The file {file_id} cannot be read: {error}."
            ) from error


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
