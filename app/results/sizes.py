"""Sizes of stored texts, known without reading them, and pages that end by their bytes."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar
from uuid import UUID

import asyncpg

from app.core.byte_budget import read_within
from app.core.pieces import in_pieces

_Row = TypeVar("_Row")

LONG_BYTES = 32_768  # a longer text is read by itself, within the byte budget
PAGE_BYTES = 4_000_000  # of texts; the row that reaches it is the last of its page
_PIECE_ROWS = 100  # that are read at once: other requests take turns between two pieces
# JSON is stored compressed, at most this much (pglz: 273 bytes in three).
_MAX_COMPRESSION = 100
_COMMON_COMPRESSION = 4
# A body holds no more; JSON that is stored larger is taken to be compressed as usual.
_COMMON_BYTES = 4_000_000
# Characters of a vector's JSON, by its bytes: four a number, of which JSON has up to 22.
VECTOR_COPIES = 6


def text_bytes(column: str) -> str:
    """SQL of a text column's size."""
    return f"coalesce(octet_length({column}), 0)"


def vector_bytes(column: str) -> str:
    """SQL of a vector's size as JSON."""
    return f"coalesce({VECTOR_COPIES} * octet_length({column}), 0)"


def json_bytes(column: str) -> str:
    """SQL of an upper bound of a jsonb column's size."""
    stored = f"pg_column_size({column})"
    return (
        f"coalesce(CASE WHEN pg_column_compression({column}) IS NULL THEN {stored} "
        f"ELSE greatest({_COMMON_COMPRESSION} * {stored}, "
        f"least({_MAX_COMPRESSION} * {stored}, {_COMMON_BYTES})) END, 0)"
    )


def unless_long(column: str, size: str) -> str:
    """SQL of a column of this size, without its long values."""
    return f"CASE WHEN {size} <= {LONG_BYTES} THEN {column} END AS {column}"


def loaded_bytes(row: Iterable[object] | None) -> int:
    """The size of the texts in a row, and of its vector as JSON."""
    size = 0
    for value in row or ():
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, bytes):
            size += VECTOR_COPIES * len(value)
    return size


@dataclass(slots=True, frozen=True)
class SizedPage(Generic[_Row]):
    """Rows of a list; the next page begins behind the id `following`, if there may be one."""

    rows: Sequence[_Row]
    following: UUID | None


@dataclass(slots=True, frozen=True)
class PageSizes:
    """Ids and sizes of the rows that a page may have; the next ones are behind the id `following`.

    Rows that vanish while a page is read are not in `rows`: `following` alone shows the end of a list.
    """

    rows: Sequence[asyncpg.Record]
    following: UUID | None

    @classmethod
    def of(cls, rows: Sequence[asyncpg.Record], limit: int) -> "PageSizes":
        """Those that one statement found, at most `limit` of them."""
        return cls(rows, following_of([row["id"] for row in rows], limit))


def following_of(ids: Sequence[UUID], limit: int) -> UUID | None:
    """The id behind which there may be more, if so many were found as were looked for."""
    return ids[-1] if len(ids) == limit else None


async def read_page(
    page: PageSizes, fetch: Callable[[list[UUID]], Awaitable[Sequence[asyncpg.Record]]]
) -> SizedPage[asyncpg.Record]:
    """Read the rows of these ids and sizes, piece by piece, until the page is full.

    Raises MemoryBusyError.
    """
    sizes = page.rows
    rows: list[asyncpg.Record] = []
    done = loaded = 0
    while done < len(sizes) and loaded < PAGE_BYTES:
        ids, size = next(pieces(sizes[done : done + _PIECE_ROWS], PAGE_BYTES - loaded))
        piece, _ = await read_within(size, partial(fetch, ids), loaded_bytes_of_all)
        rows += piece
        done += len(ids)
        loaded += loaded_bytes_of_all(piece)
    return SizedPage(rows, sizes[done - 1]["id"] if done < len(sizes) else page.following)


def pieces(sizes: Iterable[asyncpg.Record], most: int) -> Iterator[tuple[list[UUID], int]]:
    """The ids in pieces of at most `most` bytes, a larger row alone, and the bytes of each."""
    for piece in in_pieces(sizes, lambda row: int(row["size"]), most):
        yield [row["id"] for row in piece], sum(row["size"] for row in piece)


def loaded_bytes_of_all(rows: Iterable[asyncpg.Record]) -> int:
    return sum(map(loaded_bytes, rows))
