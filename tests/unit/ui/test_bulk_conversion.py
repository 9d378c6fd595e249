"""Whole files into kept rows: errors of lines, keys, and a large file in little memory."""

import io
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import orjson
import pytest
from hypothesis import given, strategies as st

from app.ui.bulk.conversion import Conversion, SeenTexts, convert
from app.ui.bulk.kept_rows import KeptRow, header_line, read_columns, read_rows
from app.ui.bulk.mapping import read_mapping, to_request
from app.ui.bulk.table import read_table
from app.ui.errors import RefusedError

LARGE = 200_000


FORM = {"prompt": "prompt", "model": "m"}


class Kept(io.BytesIO):
    """A file of kept rows, which the API serves in pieces."""

    @asynccontextmanager
    async def stream(self, *_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
        async def pieces() -> AsyncIterator[bytes]:
            content = self.getvalue()
            for start in range(0, len(content), 1000):
                yield content[start : start + 1000]

        yield SimpleNamespace(aiter_bytes=pieces)


def keep(
    file: BinaryIO, name: str = "file.csv", kept: BinaryIO | None = None, **form: str
) -> tuple[Conversion, Kept]:
    """Convert a file; what was read, and the file of its rows behind their header."""
    table = read_table(file, name)
    file.seek(0)
    mapping = read_mapping(FORM | form, table.columns)
    rows = io.BytesIO() if kept is None else kept
    done = convert(file, table, lambda row: to_request(row, mapping), rows)
    assert isinstance(rows, io.BytesIO)
    return done, Kept(header_line(done.columns, FORM | form) + rows.getvalue())


async def rows_of(kept: Kept) -> list[KeptRow]:
    api: Any = kept
    return [row async for row in read_rows(api, "file-x")]


async def test_wrong_lines_are_left_out_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ui.bulk.conversion.MAX_REQUEST", 300)
    content = 'id,prompt\na,one\na,again\nb,\n"c",two\nd,"x" y\ne,1,2\nf,' + "x" * 400 + "\n"
    done, kept = keep(io.BytesIO(content.encode()), id="id")
    assert (done.rows, done.left_out, done.requests) == (7, 5, 2)
    assert [(error.line, error.message.split(":")[0][:34]) for error in done.errors] == [
        (3, "The id “a” is that of an earlier l"),
        (4, "The prompt is empty."),
        (6, "Text follows the quotation mark th"),
        (7, "This has 3 cells, and there are 2 "),
        (8, "The request has 455 bytes, more th"),
    ]
    rows = await rows_of(kept)
    assert [(row.line, bool(row.error), row.key) for row in rows] == [
        (2, False, "a"), (3, True, ""), (4, True, ""), (5, False, "c"), (6, True, ""), (7, True, ""),
        (8, True, ""),
    ]  # fmt: skip
    assert rows[1].columns == {"id": "a", "prompt": "again"}
    assert rows[0].request == {"model": "m", "messages": [{"role": "user", "content": "one"}]}


def test_a_hundred_errors_are_reported_and_all_counted() -> None:
    done, _ = keep(io.BytesIO(b"id,prompt\n" + b"x,\n" * 250))
    assert (done.left_out, len(done.errors), done.requests) == (250, 100, 0)


async def test_columns_of_all_json_lines_are_known() -> None:
    lines = [b'{"prompt": "a"}'] * 150 + [b'{"prompt": "b", "late": 1}']
    done, kept = keep(io.BytesIO(b"\n".join(lines)), "file.jsonl")
    assert done.columns == ["prompt", "late"]
    api: Any = kept
    assert await read_columns(api, "file-x") == ["prompt", "late"]
    rows = await rows_of(kept)
    assert (rows[0].columns, rows[-1].columns) == ({"prompt": "a"}, {"prompt": "b", "late": 1})


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"[]\n", b'{"columns": ["a"]}\n', b'{"columns": [1], "form": {}}\n'],
)
async def test_a_file_of_another_program_is_refused(content: bytes) -> None:
    with pytest.raises(RefusedError, match="has no rows of a job"):
        await rows_of(Kept(content))


@pytest.mark.parametrize("line", [b"1", b"{}", b"x", b'{"line": "x", "columns": {}}'])
async def test_a_line_of_another_program_is_refused(line: bytes) -> None:
    with pytest.raises(RefusedError, match="has no rows of a job"):
        await rows_of(Kept(header_line(["prompt"], FORM) + line))


def large_table(rows: int) -> bytes:
    lines = (f'r{number},"Write, in ""{number}"" words,\nwhy."\r\n' for number in range(rows))
    return b"id,prompt\r\n" + "".join(lines).encode()


@pytest.mark.trial
async def test_a_large_file() -> None:
    """Every line of 200,000 arrives, in its order."""
    done, kept = keep(io.BytesIO(large_table(LARGE)), id="id")
    assert (done.rows, done.left_out) == (LARGE, 0)
    number = 0
    for line in kept.getvalue().splitlines()[1:]:
        assert orjson.loads(line)["cells"][0] == f"r{number}"
        number += 1
    assert number == LARGE


@pytest.mark.trial
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for rows in (15_000, 30_000):
        file = io.BytesIO(large_table(rows))
        table = read_table(file, "file.csv")
        file.seek(0)
        mapping = read_mapping(FORM, table.columns)
        with (tmp_path / "rows").open("wb") as kept:
            tracemalloc.start()
            convert(file, table, partial(to_request, mapping=mapping), kept)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    # The marks of the ids and no more: 15,000 rows have 600,000 bytes, their requests 3 million.
    assert peaks[1] - peaks[0] < 600_000, peaks


@given(st.lists(st.text(max_size=3), max_size=200))
def test_seen_texts_are_a_set(texts: list[str]) -> None:
    seen, known = SeenTexts(), set[str]()
    for text in texts:
        assert seen.add(text) is (text not in known)
        known.add(text)


def test_seen_texts_grow() -> None:
    seen = SeenTexts()
    assert all(seen.add(str(number)) for number in range(50_000))
    assert not any(seen.add(str(number)) for number in range(50_000))
