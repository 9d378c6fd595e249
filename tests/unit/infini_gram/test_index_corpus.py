"""Corpora: each form of file, and each way one can be wrong."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.infini_gram import corpus as corpora
from app.infini_gram.corpus import Corpus, CorpusError, Split

LINES = b'{"text": "one", "url": "u", "n": 1}\n\n  \n{"text": ""}\n{"text": "two\\n\xc3\xa9"}'
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
}  # fmt: skip


def read(source: Path, split: Split = "file") -> list[tuple[str, str, int, dict[str, Any]]]:
    corpus = Corpus(source, split)
    found = [(one.text, one.path, one.line, one.metadata) for one in corpus]
    assert corpus.read_bytes == corpus.size
    return found


@pytest.mark.parametrize("suffix", PACKERS)
def test_lines_of_json_are_read(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(PACKERS[suffix](b"\xef\xbb\xbf" + LINES))
    assert read(file) == [
        ("one", file.name, 0, {"url": "u", "n": 1}),
        ("two\né", file.name, 4, {}),
    ]
    assert Corpus(file).likely_text_bytes >= file.stat().st_size


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("file", [("a\nb\r\n\n \n\nc\n", 0)]),
        ("blocks", [("a\nb", 0), ("c", 5)]),
        ("lines", [("a", 0), ("b", 1), ("c", 5)]),
    ],
)
def test_texts(tmp_path: Path, suffix: str, split: Split, texts: list[tuple[str, int]]) -> None:
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(PACKERS[suffix](b"\xef\xbb\xbfa\nb\r\n\n \n\nc\n"))
    assert read(file, split) == [(text, file.name, line, {}) for text, line in texts]


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "b" / ".git").mkdir(parents=True)
    (tmp_path / "b" / "x.txt").write_text("in b")
    (tmp_path / "b" / ".git" / "y.txt").write_text("hidden")
    (tmp_path / "a.ndjson.gz").write_bytes(gzip.compress(b'{"text": "in a"}'))
    (tmp_path / "notes.md").write_text("no corpus")
    (tmp_path / "empty.txt").write_text(" \n")
    assert [(text, path) for text, path, _, _ in read(tmp_path)] == [
        ("in a", "a.ndjson.gz"),
        ("in b", "b/x.txt"),
    ]


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b\udcff.txt").write_text("x")
    assert read(tmp_path) == [("x", "b\ufffd.txt", 0, {})]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"text": "a"}\n{"text": ', "line 2: invalid JSON: "),
        (b'{"text": "a"}\n{"text": "\xe9"}', "line 2: it is not UTF-8"),
        (b'{"text": "\\ud800"}', "line 1: invalid JSON: "),
        (b'{"text": "a"}\n["text"]', "line 2: not a JSON object"),
        (b'{"texts": "a"}', "line 1: it has no text"),
        (b'{"text": null}', "line 1: it has no text"),
    ],
)
def test_lines_that_are_wrong(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(CorpusError) as raised:
        read(file)
    assert str(raised.value).startswith(f"{file}, {problem}")


@pytest.mark.parametrize(("split", "line"), [("file", 3), ("blocks", 3), ("lines", 3)])
def test_texts_that_are_no_utf8(tmp_path: Path, split: Split, line: int) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"a\n\nb\xff")
    with pytest.raises(CorpusError, match=f"line {line}: it is not UTF-8"):
        read(file, split)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"no archive" + b[10:]])
def test_archives_that_are_damaged(
    tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    lines = b"".join(orjson.dumps({"text": str(n)}) + b"\n" for n in range(1000))
    file.write_bytes(damage(PACKERS[suffix](lines)))
    with pytest.raises(CorpusError, match="damaged"):
        read(file)


def test_files_that_are_no_corpus(tmp_path: Path) -> None:
    for name, problem in (
        ("gone.txt", "does not exist"),
        ("a.pdf", "neither .txt nor .jsonl"),
        ("a.gz", "neither .txt nor .jsonl"),
        ("a.jsonl.zst", r"decompress it \(zstd -d\)"),
    ):
        if name != "gone.txt":
            (tmp_path / name).write_bytes(b"x")
        with pytest.raises(CorpusError, match=problem):
            Corpus(tmp_path / name)
    with pytest.raises(CorpusError, match="decompress it"):
        Corpus(tmp_path)
    (tmp_path / "a.jsonl.zst").unlink()
    with pytest.raises(CorpusError, match=r"holds no \.txt, \.jsonl or \.ndjson file"):
        Corpus(tmp_path)
    with pytest.raises(CorpusError, match="is not a file"):
        Corpus(Path("/dev/null"))


def test_documents_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MAX_DOCUMENT_BYTES", 20)
    (tmp_path / "a.txt").write_text("ten bytes\n" * 3)
    with pytest.raises(CorpusError, match="--split blocks"):
        read(tmp_path / "a.txt")
    assert len(read(tmp_path / "a.txt", "lines")) == 3
    (tmp_path / "b.txt").write_text("x" * 21)
    with pytest.raises(CorpusError, match="a line of more than 20 bytes"):
        read(tmp_path / "b.txt", "lines")
