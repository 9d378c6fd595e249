"""The lines of a file as text, or an error in words.

UTF-8 with or without its byte order mark, and UTF-16 with it, are read. Other encodings are not
guessed: a wrong guess would silently corrupt prompts. Memory is bounded by the longest line.
"""

import codecs
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

MAX_LINE = 2_000_000  # characters; also of a record of several lines
HEAD_BYTES = 65_536  # the part from which formats are detected
_CHUNK_BYTES = 262_144

# https://en.wikipedia.org/wiki/List_of_file_signatures
_SIGNATURES = (
    (b"PK\x03\x04", "an Excel workbook or a ZIP archive"),
    (b"\xd0\xcf\x11\xe0", "an old Excel or Word document"),
    (b"%PDF", "a PDF document"),
    (b"\x89PNG", "a picture (PNG)"),
    (b"\xff\xd8\xff", "a picture (JPEG)"),
    (b"GIF8", "a picture (GIF)"),
    (b"\x1f\x8b", "compressed (gzip)"),
    (b"BZh", "compressed (bzip2)"),
    (b"\x28\xb5\x2f\xfd", "compressed (Zstandard)"),
    (b"\xfd7zXZ\x00", "compressed (xz)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"{\\rtf", "a rich-text document"),
)
_AS_TEXT = "Save the table as CSV (UTF-8), or write one JSON object on each line."


class SourceError(Exception):
    """The whole file is unusable; the message has the reason and the remedy."""


class Encoding(NamedTuple):
    codec: str
    label: str
    has_old_newlines: bool  # only CR, as old Macintosh programs write


def sniff_encoding(head: bytes) -> Encoding:
    """The encoding of a file that begins so. Raises SourceError for binary data."""
    if not head.strip():
        raise SourceError("The file is empty.")
    for signature, label in _SIGNATURES:
        if head.startswith(signature):
            raise SourceError(f"The file is {label}, not text. {_AS_TEXT}")
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        raise SourceError("The file is in UTF-32. Save it as UTF-8.")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = head.decode("utf-16", "replace")
        return Encoding("utf-16", "UTF-16", "\r" in text and "\n" not in text)
    if b"\x00" in head:
        raise SourceError(
            "The file has NUL bytes: it is not text, or it is UTF-16 without a byte order mark. "
            + _AS_TEXT
        )
    label = "UTF-8 with its mark" if head.startswith(codecs.BOM_UTF8) else "UTF-8"
    return Encoding("utf-8-sig", label, b"\r" in head and b"\n" not in head)


def head_text(head: bytes, encoding: Encoding) -> str:
    """The text of a file's first bytes."""
    text = head.decode(encoding.codec, "ignore")
    return text.replace("\r", "\n") if encoding.has_old_newlines else text


def read_lines(file: BinaryIO, encoding: Encoding) -> Iterator[str]:
    """Every line with its end. Raises SourceError for invalid text or a line that is too long."""
    decoder = codecs.getincrementaldecoder(encoding.codec)("strict")
    rest, number, chunk = "", 0, b"?"
    while chunk:
        chunk = file.read(_CHUNK_BYTES)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _undecodable(error, number + 1, encoding) from error
        if encoding.has_old_newlines:
            text = text.replace("\r", "\n")
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            number += 1
            if len(line) > MAX_LINE:
                raise too_long(number)
            if "\x00" in line:
                raise _nul(number)
            yield line + "\n"
        if len(rest) > MAX_LINE:
            raise too_long(number + 1)
    if "\x00" in rest:
        raise _nul(number + 1)
    if rest:
        yield rest


def too_long(line: int) -> SourceError:
    return SourceError(
        f"Line {line:,} is longer than {MAX_LINE:,} characters. If it is a table, a quotation mark "
        "may be missing before; if it is JSON, write each object on a line of its own."
    )


def _nul(line: int) -> SourceError:
    return SourceError(f"Line {line:,} has a NUL character: the file is damaged, or no text.")


def _undecodable(error: UnicodeDecodeError, line: int, encoding: Encoding) -> SourceError:
    before = error.object[: error.start].decode(error.encoding, "replace")
    line += before.count("\r" if encoding.has_old_newlines else "\n")
    if encoding.codec == "utf-16":
        return SourceError(
            f"Line {line:,} is not valid UTF-16, which the file's first bytes announce. "
            "Save the file as UTF-8."
        )
    return SourceError(
        f"Line {line:,} is not UTF-8: the byte {error.object[error.start]:#04x} cannot stand there. "
        "The file is probably in an older encoding, such as Windows-1252 or Latin-1. Save it as "
        "UTF-8 (in Excel: “CSV UTF-8”)."
    )
