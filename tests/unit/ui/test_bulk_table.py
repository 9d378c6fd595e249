"""Uploaded files as rows: formats, encodings, and the errors for everything else."""

import codecs
import io
import zipfile

import pytest
from hypothesis import given, strategies as st

from app.ui.bulk import text
from app.ui.bulk.delimited import Row
from app.ui.bulk.table import MAX_COLUMNS, read_table
from app.ui.bulk.text import MAX_LINE, SourceError, read_lines, sniff_encoding

TABLE = 'id,prompt\n1,"Hi ""hello"",\nthen stop"\n\n2,Grüße 🌍\n'
ROWS = [
    Row(2, {"id": "1", "prompt": 'Hi "hello",\nthen stop'}),
    Row(5, {"id": "2", "prompt": "Grüße 🌍"}),
]


def read(content: bytes | str, filename: str = "file.csv", delimiter: str = "") -> list[Row]:
    file = io.BytesIO(content.encode() if isinstance(content, str) else content)
    table = read_table(file, filename, delimiter)
    file.seek(0)
    return list(table.rows(file))


def problem(content: bytes | str, filename: str = "file.csv") -> str:
    with pytest.raises(SourceError) as caught:
        read(content, filename)
    return str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_in_every_form(encoding: str, newline: str, delimiter: str) -> None:
    # The comma inside the quotation marks stays, for all separators of cells.
    written = TABLE.replace("id,", f"id{delimiter}").replace("1,", f"1{delimiter}")
    written = written.replace("2,", f"2{delimiter}").replace("\n", newline)
    content = written.encode(encoding)
    if encoding == "utf-16-be":
        content = codecs.BOM_UTF16_BE + content
    read_newline = "\n" if newline == "\r" else newline  # old ones are read as new ones
    first = Row(2, {"id": "1", "prompt": f'Hi "hello",{read_newline}then stop'})
    assert read(content, "file.txt") == [first, ROWS[1]]


@given(
    st.lists(
        st.lists(
            st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=2, max_size=2
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_the_csv_module_writes_is_read(cells: list[list[str]]) -> None:
    rows = ['"' + '","'.join(cell.replace('"', '""') for cell in row) + '"\r\n' for row in cells]
    content = "first,second\n" + "".join(rows)
    assert [list(row.values.values()) for row in read(content, delimiter=",")] == cells


def test_the_file_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_CHUNK_BYTES", 3)
    assert read(TABLE) == ROWS
    assert read(TABLE.encode("utf-16")) == ROWS


def test_json_lines() -> None:
    content = '{"a": 1, "b": ["x"]}\n\n"a text"\r\n[1]\n{"a": 1\n{"c": null}'
    rows = read("\ufeff" + content, "file.jsonl")
    assert [(row.line, row.values) for row in rows] == [
        (1, {"a": 1, "b": ["x"]}), (3, {"text": "a text"}), (4, {}), (5, {}), (6, {"c": None}),
    ]  # fmt: skip
    assert rows[2].error == "This must be a JSON object, or a text in quotation marks."
    assert rows[3].error.startswith("This is no valid JSON: ")
    table = read_table(io.BytesIO(content.encode()), "unnamed")
    assert (table.kind, table.columns, table.is_batch) == ("jsonl", ["a", "b", "text", "c"], False)


def test_lines_of_a_batch_are_known() -> None:
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    assert read_table(io.BytesIO(line), "requests.jsonl").is_batch
    assert not read_table(io.BytesIO(b"custom_id,url,body\n1,2,3\n"), "requests.csv").is_batch


def test_one_column_of_long_texts() -> None:
    prompt = "Why, and how; or\twhen? " * 20_000  # more than the csv module takes by itself
    assert read(f'prompt\n"{prompt}"\n') == [Row(2, {"prompt": prompt})]


def test_rows_with_more_or_fewer_cells() -> None:
    rows = read("a,b\n1\n1,2,3\n4,5\n", delimiter=",")
    assert [row.values for row in rows] == [
        {"a": "1", "b": ""}, {"a": "1", "b": "2"}, {"a": "4", "b": "5"},
    ]  # fmt: skip
    assert [bool(row.error) for row in rows] == [False, True, False]
    assert "3 cells, and there are 2 columns" in rows[1].error


def test_commas_behind_the_last_cell_are_none() -> None:
    rows = read(",a,b\n0,1,2,,\n1,3,\n", delimiter=",")
    assert [(row.values, row.error) for row in rows] == [
        ({"column 1": "0", "a": "1", "b": "2"}, ""), ({"column 1": "1", "a": "3", "b": ""}, ""),
    ]  # fmt: skip


def test_a_wrong_quotation_mark_costs_its_row_alone() -> None:
    rows = read('a,b\n1,"x" y\n2,z\n')
    assert (rows[0].line, rows[0].values) == (2, {})
    assert "Text follows the quotation mark" in rows[0].error
    assert rows[1] == Row(3, {"a": "2", "b": "z"})


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("sheet.xml", "<a/>")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "The file is empty."),
        (b" \n\n", "The file is empty."),
        (b"a,b\n", "no row beneath"),
        (b"\xef\xbb\xbfa,b\n\n", "no row beneath"),
        (zipped(), "an Excel workbook or a ZIP archive, not text. Save the table as CSV"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"\x89PNG\r\n\x1a\n", "a picture (PNG)"),
        (b"\x1f\x8b\x08", "compressed (gzip)"),
        (b"a,b\n1,\x00\n", "NUL bytes"),
        ("a,b\n1,2\n".encode("utf-16-le"), "UTF-16 without a byte order mark"),
        ("a,b\n1,2\n".encode("utf-32"), "UTF-32"),
        (b"a,b\n1,2\n1,caf\xe9\n", "Line 3 is not UTF-8: the byte 0xe9 cannot stand there."),
        (b"a\rb\rcaf\xe9\r", "Line 3 is not UTF-8"),
        (b"\xff\xfea\x00\n\x00b\x00\n\x00\x00\xd8a\x00", "Line 3 is not valid UTF-16"),
        (b"a,b\n1," + b"x" * (MAX_LINE + 1), "Line 2 is longer than 2,000,000 characters."),
        (b'a,b\n1,2\n1,"never\nends\n', "Line 3: a cell in quotation marks begins here"),
        (b"a,b,a\n1,2,3\n", "Columns 1 and 3 have the same name, “a”."),
        (b"x," * MAX_COLUMNS + b"x\n1\n", f"has {MAX_COLUMNS + 1} columns; at most {MAX_COLUMNS}"),
        (b"[\n  {}\n]\n", "one JSON list"),
        (b"{}\n{}\n", "Line 1: The object has no members."),
        (b'{\n  "a": 1\n}\n', "Line 1: This is no valid JSON"),
    ],
)
def test_what_is_no_table(content: bytes, words: str) -> None:
    assert words in problem(content, "file")


def test_a_quoted_cell_without_an_end_does_not_take_the_file_into_memory() -> None:
    lines = b"1,2\n" * 10 + b'1,"open\n' + b"1,2\n" * MAX_LINE
    assert "Line 12 is longer than" in problem(b"a,b\n" + lines)


def test_nul_far_behind_the_head() -> None:
    content = b"a,b\n" + b"1,2\n" * 50_000 + b"1,\x00\n"
    assert problem(content).startswith("Line 50,002 has a NUL character")


def test_names_of_columns() -> None:
    rows = read("\ufeff id ,,b\n1,2,3\n")
    assert rows[0].values == {"id": "1", "column 2": "2", "b": "3"}


def test_lines_keep_what_python_takes_for_their_ends() -> None:
    content = "a\x0bb\u2028c\x85d\n".encode()
    assert list(read_lines(io.BytesIO(content), sniff_encoding(content))) == [content.decode()]


def test_members_with_endless_names_are_no_columns() -> None:
    content = '{"a": 1, "%s": 2}\n' % ("x" * 200)
    table = read_table(io.BytesIO(content.encode()), "file.jsonl")
    assert table.columns == ["a"]
    assert len(table.sample[0].values) == 2
