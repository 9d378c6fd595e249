"""The documents of a corpus: .txt and .jsonl files, plain or compressed, alone or in a directory.

A line of JSON is a document: its `text`, and all other members as metadata. A text file is one
document, or each of its blocks between blank lines, or each of its lines.
"""

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import orjson

Split = Literal["file", "blocks", "lines"]

# A document is encoded in one piece, which takes some twenty times its size.
MAX_DOCUMENT_BYTES = 100_000_000
_LINES = (".jsonl", ".ndjson")
_TEXTS = (".txt",)
# Each with the likely ratio of its text's size to the file's.
_OPENERS: dict[str, tuple[Callable[[IO[bytes]], IO[bytes]], int]] = {
    "": (lambda raw: raw, 1),
    ".gz": (lambda raw: cast("IO[bytes]", gzip.GzipFile(fileobj=raw)), 4),
    ".bz2": (lambda raw: cast("IO[bytes]", bz2.BZ2File(raw)), 5),
    ".xz": (lambda raw: cast("IO[bytes]", lzma.LZMAFile(raw)), 6),  # noqa: SIM115 # the reader closes it
}
_ELSEWHERE = {".zst": "zstd -d", ".lz4": "lz4 -d", ".zip": "unzip", ".7z": "7z x"}
_MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark; not a part of the text


class CorpusError(Exception):
    """The corpus cannot be read; the message is one line that names the file and the line."""


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A text and its origin: the file, relative to the corpus, and the line, from 0."""

    text: str
    path: str
    line: int
    metadata: dict[str, Any]


class Corpus:
    """The files of a corpus; iterating yields documents. `read_bytes` of `size` have been read."""

    def __init__(self, source: Path, split: Split = "file") -> None:
        """Find the files. Raises CorpusError if there are none."""
        self._split = split
        try:
            if source.is_dir():
                self._root = source
                self._files = sorted(_files(source))
            else:
                self._root = source.parent
                self._files = [source]
            self._kinds = [_kind(file) for file in self._files]
            self.size = sum(file.stat().st_size for file in self._files)
        except OSError as error:
            raise CorpusError(f"{error.filename}: {error.strerror}") from error
        if not self._files:
            raise CorpusError(
                f"{source} holds no .txt, .jsonl or .ndjson file (nor a .gz, .bz2 or .xz one)"
            )
        self.read_bytes = 0

    @property
    def likely_text_bytes(self) -> int:
        return sum(
            file.stat().st_size * _OPENERS[compression][1]
            for file, (_, compression) in zip(self._files, self._kinds, strict=True)
        )

    def __iter__(self) -> Iterator[CorpusDocument]:
        """Each document that has a text. Raises CorpusError at the first invalid one."""
        before = 0
        for file, (kind, compression) in zip(self._files, self._kinds, strict=True):
            # Some file systems allow names that are not valid UTF-8.
            path = os.fsencode(file.relative_to(self._root)).decode("utf-8", "replace")
            try:
                with file.open("rb") as raw, _OPENERS[compression][0](raw) as stream:
                    documents = self._lines if kind in _LINES else self._texts
                    for document in documents(file, path, stream):
                        self.read_bytes = before + raw.tell()
                        if document.text:
                            yield document
            except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
                raise CorpusError(f"{file} is damaged: {error}") from error
            except OSError as error:
                # bz2 reports damage this way, without an errno
                problem = error.strerror or f"it is damaged: {error}"
                raise CorpusError(f"{file}: {problem}") from error
            before += file.stat().st_size
            self.read_bytes = before

    def _lines(self, file: Path, path: str, stream: IO[bytes]) -> Iterator[CorpusDocument]:
        for number, line in enumerate(_bounded_lines(file, stream)):
            if not line.strip():
                continue
            place = f"{file}, line {number + 1}"
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if not _is_utf8(line):
                    raise CorpusError(f"{place}: it is not UTF-8") from None
                raise CorpusError(f"{place}: invalid JSON: {error}") from None
            if not isinstance(row, dict):
                raise CorpusError(f"{place}: not a JSON object")
            text = row.pop("text", None)
            if not isinstance(text, str):
                raise CorpusError(f"{place}: it has no text: the member `text` must be a string")
            yield CorpusDocument(text, path, number, row)

    def _texts(self, file: Path, path: str, stream: IO[bytes]) -> Iterator[CorpusDocument]:
        block: list[bytes] = []
        size = begun = 0
        for number, line in enumerate(_bounded_lines(file, stream)):
            is_end = self._split == "lines" or (self._split == "blocks" and not line.strip())
            if is_end:
                yield _text(file, path, begun, block, is_part=self._split != "file")
                block, size, begun = [], 0, number if self._split == "lines" else number + 1
                if self._split == "blocks":
                    continue
            block.append(line)
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise CorpusError(
                    f"{file} is one document of more than {MAX_DOCUMENT_BYTES} bytes: take its "
                    "blocks between blank lines, or its lines (--split blocks, --split lines)"
                )
        yield _text(file, path, begun, block, is_part=self._split != "file")


def _text(
    file: Path, path: str, begun: int, block: list[bytes], *, is_part: bool
) -> CorpusDocument:
    """The lines as one document; one that is a part of a file does not end with a newline."""
    try:
        text = b"".join(block).decode("utf-8")
    except UnicodeDecodeError as error:
        line = begun + error.object[: error.start].count(b"\n") + 1
        raise CorpusError(f"{file}, line {line}: it is not UTF-8: {error.reason}") from None
    if not text.strip():
        text = ""
    return CorpusDocument(text.rstrip("\r\n") if is_part else text, path, begun, {})


def _bounded_lines(file: Path, stream: IO[bytes]) -> Iterator[bytes]:
    is_first = True
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise CorpusError(f"{file} has a line of more than {MAX_DOCUMENT_BYTES} bytes")
        yield line.removeprefix(_MARK) if is_first else line
        is_first = False


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _files(directory: Path) -> Iterator[Path]:
    for file in directory.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
        if hidden or not file.is_file():
            continue
        inner = Path(file.stem) if file.suffix in {*_OPENERS, *_ELSEWHERE} else file
        if inner.suffix in (*_LINES, *_TEXTS):
            yield file


def _kind(file: Path) -> tuple[str, str]:
    if not file.exists():
        raise CorpusError(f"{file} does not exist")
    if not file.is_file():
        raise CorpusError(f"{file} is not a file")
    suffix = file.suffix.lower()
    if command := _ELSEWHERE.get(suffix):
        raise CorpusError(f"{file}: {suffix} cannot be read here: decompress it ({command})")
    compression = suffix if suffix in _OPENERS else ""
    kind = Path(file.stem).suffix.lower() if compression else suffix
    if kind not in (*_LINES, *_TEXTS):
        raise CorpusError(f"{file} is neither .txt nor .jsonl (nor a .gz, .bz2 or .xz of one)")
    return kind, compression
