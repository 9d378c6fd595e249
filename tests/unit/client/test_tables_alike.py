"""One table of files, read by the web page and by the client's `map`: the same rows, errors and refusals."""

import io
from pathlib import Path
from typing import Any

import pytest

from app.ui.bulk.table import read_table
from app.ui.bulk.text import MAX_LINE, SourceError
from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.sources import BadRow, open_source

ROOT = Path(__file__).resolve().parents[3]
WRONG = object()  # a row that is left out
AB = [{"a": "1", "b": "2"}]


def by_page(path: Path) -> list[Any] | str:
    file = io.BytesIO(path.read_bytes())
    try:
        table = read_table(file, path.name)
        file.seek(0)
        rows = list(table.rows(file))
    except SourceError as error:
        return str(error)
    return [WRONG if row.error else row.values for row in rows]


def by_client(path: Path) -> list[Any] | str:
    try:
        rows = list(open_source(path).rows)
    except ConfigurationError as error:
        return str(error)
    texts = ({"text": row} if isinstance(row, str) else row for row in rows)
    return [WRONG if isinstance(row, BadRow) else row for row in texts]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        # Names of columns.
        ("index.csv", b",a,b\n0,1,2\n", [{"column 1": "0", "a": "1", "b": "2"}]),
        ("spaces.csv", b" a ,b\n1, 2\n", [{"a": "1", "b": " 2"}]),
        ("twice.csv", b"a,b,a\n1,2,3\n", "have the same name"),
        ("after-spaces.csv", b"a, a\n1,2\n", "have the same name"),
        # Cells.
        ("commas.csv", b"a,b\n1,2,,\n", AB),
        ("short.csv", b"a,b\n1\n1,2\n", [{"a": "1", "b": ""}, *AB]),
        ("long.csv", b"a,b\n1,2,3\n1,2\n", [WRONG, *AB]),
        ("gap.csv", b"a,b\n1,2,,3\n", [WRONG]),
        ("blank.csv", b"\na,b\n\n1,2\n\n", AB),
        ("quoted.csv", b'a,b\n"1 ""x"",\n2",3\n', [{"a": '1 "x",\n2', "b": "3"}]),
        ("behind-quote.csv", b'a,b\n"1" x,2\n1,2\n', [WRONG, *AB]),
        ("open.csv", b'a,b\n1,2\n1,"2\n', "never ends"),
        ("keys.csv", b"a,b\n1,2\n1,2\n", AB + AB),
        # Separators.
        ("semicolons.csv", b"a;b\n1;2\n", AB),
        ("bars.csv", b"a|b\n1|2\n", AB),
        ("tabs.csv", b"a\tb\n1\t2\n", AB),
        ("tabs.tsv", b"a,x\tb\n1,5\t2\n", [{"a,x": "1,5", "b": "2"}]),
        ("commas.tsv", b"a,b\n1,2\n", AB),
        ("one.csv", b"a\nx\n", [{"a": "x"}]),
        # Encodings and lines.
        ("bom.csv", b"\xef\xbb\xbfa,b\n1,2\n", AB),
        ("utf16.csv", "a,b\n1,2\n".encode("utf-16"), AB),
        ("windows.csv", b"a,b\r\n1,2\r\n", AB),
        ("macintosh.csv", b"a,b\r1,2\r", AB),
        ("no-end.csv", b"a,b\n1,2", AB),
        ("latin.csv", b"a,b\n1,caf\xe9\n", "Line 2 is not UTF-8"),
        ("nul.csv", b"a,b\n1,\x00\n", "NUL"),
        ("utf32.csv", "a,b\n1,2\n".encode("utf-32"), "UTF-32"),
        ("workbook.csv", b"PK\x03\x04\x00", "Excel workbook"),
        # Bounds.
        ("cell.csv", b"a,b\n1," + b"x" * 200_000 + b"\n", [{"a": "1", "b": "x" * 200_000}]),
        ("line.csv", b"a,b\n1," + b"x" * MAX_LINE + b"\n", "Line 2 is longer"),
        ("record.csv", b'a,b\n1,"' + b"1234567\n" * (MAX_LINE // 8) + b'"\n', "Line 2 is longer"),
        # JSON lines.
        ("rows.jsonl", b'{"a": 1}\n\n"x"\r\n{oops\n7 8\n{"a": null}', [{"a": 1}, {"text": "x"}, WRONG, WRONG, {"a": None}]),
        ("bom.jsonl", b'\xef\xbb\xbf{"a": 1}\n\xef\xbb\xbf{"a": 2}\n', [{"a": 1}, WRONG]),
        ("utf16.jsonl", '{"a": "é"}\n'.encode("utf-16"), [{"a": "é"}]),
        ("macintosh.jsonl", b'{"a": 1}\r{"a": 2}\r', [{"a": 1}, {"a": 2}]),
        ("separators.jsonl", '{"a": "x\u2028y\x85z"}\n'.encode(), [{"a": "x\u2028y\x85z"}]),
        ("numbers.jsonl", b'{"a": NaN}\n{"a": 1}\n', [WRONG, {"a": 1}]),
        ("deep.jsonl", b'{"b": 1}\n{"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}\n", [{"b": 1}, WRONG]),
        ("latin.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "Line 2 is not UTF-8"),
        ("line.jsonl", b'{"a": "' + b"x" * MAX_LINE + b'"}\n', "Line 1 is longer"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)  # fmt: skip
def test_page_and_client_read_a_file_alike(
    tmp_path: Path, name: str, content: bytes, expected: list[Any] | str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for found in (by_page(path), by_client(path)):
        if isinstance(expected, str):
            assert expected in found
        else:
            assert found == expected


@pytest.mark.parametrize("name", ["text", "delimited"])
def test_both_have_the_same_reader(name: str) -> None:
    page = (ROOT / f"app/ui/bulk/{name}.py").read_text()
    client = (ROOT / f"client/llm_api_client/jobs/{name}.py").read_text()
    assert client == page.replace("app.ui.bulk.", "llm_api_client.jobs."), "copy the changed one"
