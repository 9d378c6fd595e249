"""Rows of data sets: sources, prompts, keys, lists to send."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.batches import Batch, Batcher, digest
from llm_api_client.jobs.ordering import Ordering
from llm_api_client.jobs.prompts import RowError, compile_prompt
from llm_api_client.jobs.records import Row, failed_row
from llm_api_client.jobs.sources import BadRow, Source, open_source

ROWS = [{"id": i, "topic": f"t {i} ä"} for i in range(2500)]


def batches(rows: Any, prompt: Any = "{topic}", key: Any = "id") -> list[Batch]:
    options = {"model": "m", "parameters": {"max_tokens": 3}}
    return list(Batcher(open_source(rows), compile_prompt(prompt), key, options))


@pytest.fixture(
    params=["list", "generator", "pandas", "polars", "lazy", "jsonl", "csv", "tsv", "parquet"]
)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kind = request.param
    if kind == "list":
        return ROWS
    if kind == "generator":
        return iter(ROWS)
    if kind == "pandas":
        return pd.DataFrame(ROWS)
    if kind in ("polars", "lazy"):
        frame = pl.DataFrame(ROWS)
        return frame if kind == "polars" else frame.lazy()
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        pd.DataFrame(ROWS).to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    return path


def test_every_kind_of_source_has_the_same_rows(source: Any) -> None:
    found = batches(source)
    assert [len(batch.items) for batch in found] == [1000, 1000, 500]
    sent = [body for batch in found for body in json.loads(batch.encoded("j"))]
    assert sent[0] == {
        "job_id": "j", "job_key": "0", "content": "t 0 ä", "model": "m",
        "parameters": {"max_tokens": 3},
    }  # fmt: skip
    assert [body["job_key"] for body in sent] == [str(row["id"]) for row in ROWS]
    assert [body["content"] for body in sent] == [row["topic"] for row in ROWS]


def test_lists_are_bounded_in_bytes() -> None:
    found = batches(["x" * 400_000] * 10, prompt=None, key=None)
    assert [len(batch.items) for batch in found] == [4, 4, 2]


def test_a_source_is_read_as_it_is_needed() -> None:
    taken = 0

    def rows() -> Iterator[str]:
        nonlocal taken
        for _ in range(10**9):
            taken += 1
            yield "x"

    next(iter(Batcher(open_source(rows()), compile_prompt(None), None, {})))
    assert taken == 1000


@pytest.mark.parametrize(
    ("template", "row", "prompt"),
    [
        ("{a} {{b}} {a}", {"a": 1}, "1 {b} 1"),
        ("{text}!", "row", "row!"),
        (None, "row", "row"),
        (None, [{"role": "user", "content": "x"}], [{"role": "user", "content": "x"}]),
        ([{"role": "user", "content": "{a}"}], {"a": "x"}, [{"role": "user", "content": "x"}]),
        (lambda row: row["a"] * 2, {"a": "x"}, "xx"),
        ("{a b}", {"a b": "{c}"}, "{c}"),
    ],
)
def test_prompts(template: Any, row: Any, prompt: Any) -> None:
    assert compile_prompt(template)(row) == prompt


@pytest.mark.parametrize("template", ["{", "}", "{}", "{a!r}", "{a:>9}"])
def test_templates_that_are_no_templates(template: str) -> None:
    with pytest.raises(ConfigurationError):
        compile_prompt(template)


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        ("{a}", {"b": 1}, "missing column a; the row has b"),
        ("{a.__class__}", {"a": 1}, "missing column a.__class__"),
        ("{a}", {"a": None}, "the column a is empty"),
        ("{a}", {"a": float("nan")}, "the column a is empty"),
        ("{a}", 5, "of type int"),
        (None, 5, "a text or the messages"),
        (lambda row: 5, "x", "must return"),
        (lambda row: 1 / 0, "x", "ZeroDivisionError"),
    ],
)
def test_rows_that_cannot_be_sent(template: Any, row: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        compile_prompt(template)(row)


@pytest.mark.parametrize("key", ["", None, float("nan"), "x" * 256, "a\nb"])
def test_wrong_keys(key: Any) -> None:
    (batch,) = batches([{"id": key, "topic": "x"}, {"topic": "no key"}, {"id": "ok", "topic": "x"}])
    assert len(batch.failed) == 2
    assert [item.key for item in batch.items] == ["ok"]


def test_duplicate_keys_of_one_list() -> None:
    rows = [{"id": 1, "topic": "x"}, {"id": 1, "topic": "x"}, {"id": 1, "topic": "y"}]
    (batch,) = batches(rows)
    assert len(batch.items) == 1
    assert [row.error.code for row in batch.failed if row.error] == ["duplicate_key"]


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{oops\n"text"\n', [1]),
        ("a.csv", b"\xef\xbb\xbfa,b\n1,2\n3\n4,5,6\n", [2]),
    ],
)
def test_wrong_lines_are_rows(tmp_path: Path, name: str, content: bytes, wrong: list[int]) -> None:
    (tmp_path / name).write_bytes(content)
    rows = list(open_source(tmp_path / name).rows)
    assert len(rows) == 3
    assert [i for i, row in enumerate(rows) if isinstance(row, BadRow)] == wrong


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (",id,topic\n0,a,x\n1,b,\n", [{"column 1": "0", "id": "a", "topic": "x"},
                                      {"column 1": "1", "id": "b", "topic": ""}]),
        ("id,topic,,\na,x,,\n", [{"id": "a", "topic": "x", "column 3": "", "column 4": ""}]),
        ("id,topic\na,x,,\n\nb,y,\n", [{"id": "a", "topic": "x"}, {"id": "b", "topic": "y"}]),
    ],
)  # fmt: skip
def test_tables_of_other_programs(
    tmp_path: Path, content: str, expected: list[dict[str, str]]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    assert list(open_source(path).rows) == expected


def test_other_data_is_another_job() -> None:
    def name(rows: list[str], size: int | None = 3) -> str:
        batch = next(iter(Batcher(open_source(rows), compile_prompt(None), None, {"model": "m"})))
        return digest(Source(iter(()), None, size), batch)

    assert name(["a", "b"]) == name(["a", "b"])
    assert len({name(["a", "b"]), name(["a", "c"]), name(["a", "b"], 4)}) == 3


def test_the_order_of_the_data() -> None:
    ordering = Ordering()
    ordering.expect([("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", 5)])
    ordering.end([Row(key="b"), Row(key="c")])
    assert list(ordering.ready()) == []
    ordering.refuse([failed_row("a", "duplicate_key", "x")])  # the later of the two
    ordering.end([Row(key="a")])
    ready = deque((row.input, row.error is None) for row in ordering.ready())
    assert ready == deque([(1, True), (2, True), (3, False), (4, True)])
    (last,) = ordering.skip()
    assert (last.input, len(ordering)) == (5, 0)
