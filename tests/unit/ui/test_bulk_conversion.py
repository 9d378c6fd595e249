"""Whole files into batches: parts, errors of lines, ids, and a large file in little memory."""

import io
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from hypothesis import given, strategies as st

from app.batches.lines import LineReader
from app.ui.bulk.conversion import Bounds, Conversion, SeenTexts, convert
from app.ui.bulk.mapping import CHAT, check_line, read_mapping, to_line
from app.ui.bulk.table import read_table

LARGE = 200_000


def convert_csv(file: BinaryIO, directory: Path, bounds: Bounds, **form: str) -> Conversion:
    table = read_table(file, "file.csv")
    file.seek(0)
    mapping = read_mapping({"prompt": "prompt", **form}, table.columns)
    return convert(file, table, lambda row: to_line(row, mapping), directory, bounds)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_wrong_lines_are_left_out_and_reported(tmp_path: Path) -> None:
    content = 'id,prompt\na,one\na,again\nb,\n"c",two\nd,"x" y\ne,1,2\nf,' + "x" * 400 + "\n"
    done = convert_csv(io.BytesIO(content.encode()), tmp_path, Bounds(line_size=300), id="id")
    assert (done.rows, done.left_out, done.requests) == (7, 5, 2)
    assert [(error.line, error.message.split(":")[0][:34]) for error in done.errors] == [
        (3, "The id “a” is that of an earlier l"),
        (4, "The prompt is empty."),
        (6, "Text follows the quotation mark th"),
        (7, "This has 3 cells, and there are 2 "),
        (8, "The request has 514 bytes, more th"),
    ]
    assert [line["custom_id"] for line in read_jsonl(done.parts[0].path)] == ["a", "c"]
    rows = read_jsonl(done.parts[0].rows_path)
    assert [(row["line"], "error" in row) for row in rows] == [
        (2, False), (3, True), (4, True), (5, False), (6, True), (7, True), (8, True),
    ]  # fmt: skip
    assert rows[1]["columns"] == {"id": "a", "prompt": "again"}


def test_a_hundred_errors_are_reported_and_all_counted(tmp_path: Path) -> None:
    content = "id,prompt\n" + "x,\n" * 250
    done = convert_csv(io.BytesIO(content.encode()), tmp_path, Bounds())
    assert (done.left_out, len(done.errors), done.requests) == (250, 100, 0)


def test_parts_end_by_lines_and_by_bytes(tmp_path: Path) -> None:
    content = "prompt\n" + "".join(f"{'x' * (number * 50)}y\n" for number in range(7))
    done = convert_csv(io.BytesIO(content.encode()), tmp_path, Bounds(lines=3, size=700))
    assert [part.lines for part in done.parts] == [3, 2, 1, 1]
    for part in done.parts:
        assert part.size == part.path.stat().st_size
        assert len(read_jsonl(part.path)) == len(read_jsonl(part.rows_path)) == part.lines
    ids = [line["custom_id"] for part in done.parts for line in read_jsonl(part.path)]
    assert ids == [f"line-{number}" for number in range(2, 9)]


def test_rows_that_are_left_out_stay_with_the_part_that_is_open(tmp_path: Path) -> None:
    """Their values are forgotten when there are too many of them, their reasons never."""
    content = "prompt,x\n" + ",lost\n" * 30 + "a,1\nb,2\n,3\n"
    done = convert_csv(io.BytesIO(content.encode()), tmp_path, Bounds(lines=1, size=1000))
    assert [(part.lines, part.left_out) for part in done.parts] == [(1, 30), (1, 1)]
    first, second = (read_jsonl(part.rows_path) for part in done.parts)
    assert [row["line"] for row in first + second] == list(range(2, 35))
    assert first[0]["columns"] == {"prompt": "", "x": "lost"}
    assert (first[29]["columns"], first[29]["error"]) == ({}, "The prompt is empty.")
    assert first[30]["columns"] == {"prompt": "a", "x": "1"}


def test_columns_of_all_json_lines_are_known(tmp_path: Path) -> None:
    lines = [b'{"prompt": "a"}'] * 150 + [b'{"prompt": "b", "late": 1}']
    file = io.BytesIO(b"\n".join(lines))
    table = read_table(file, "file.jsonl")
    file.seek(0)
    mapping = read_mapping({"prompt": "prompt"}, table.columns)
    done = convert(file, table, lambda row: to_line(row, mapping), tmp_path, Bounds())
    assert (table.columns, done.columns) == (["prompt"], ["prompt", "late"])


def test_lines_that_are_requests_are_not_touched(tmp_path: Path) -> None:
    text = '{ "custom_id": "a",  "method": "POST", "url": "%s", "body": {"temperature": 1.50}}'
    content = (text % CHAT).encode()
    file = io.BytesIO(content + b"\r\n" + content)
    table = read_table(file, "requests.jsonl")
    file.seek(0)
    done = convert(file, table, lambda row: check_line(row, CHAT), tmp_path, Bounds())
    assert done.parts[0].path.read_bytes() == content + b"\n"
    assert done.errors[0].message == "The id “a” is that of an earlier line."


def large_table(rows: int) -> bytes:
    lines = (f'r{number},"Write, in ""{number}"" words,\nwhy."\r\n' for number in range(rows))
    return b"id,prompt\r\n" + "".join(lines).encode()


def test_a_large_file(tmp_path: Path) -> None:
    """Every line of 200,000 arrives, in its order and its part."""
    done = convert_csv(io.BytesIO(large_table(LARGE)), tmp_path, Bounds(), id="id")
    assert (done.rows, done.left_out) == (LARGE, 0)
    assert [part.lines for part in done.parts] == [50_000] * 4
    reader = LineReader(CHAT, 50_000)
    number = LARGE - 50_000
    with done.parts[-1].path.open("rb") as part:
        for place, line in enumerate(part, 1):
            read = reader.read(place, line)
            assert read is not None
            assert read.custom_id == f"r{number}"
            number += 1
    assert (reader.errors, number) == ([], LARGE)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for rows in (15_000, 30_000):
        file = io.BytesIO(large_table(rows))
        tracemalloc.start()
        convert_csv(file, tmp_path, Bounds())
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
