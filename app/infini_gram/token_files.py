"""Writer of a shard's files, except the suffix array: the tokens, with their documents and counts."""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from app.infini_gram.build_options import BuildError, Report
from app.infini_gram.corpus import Corpus, CorpusDocument
from app.infini_gram.declarations import TYPE_CODE, WIDTH
from app.infini_gram.tokenizer import Tokenizer

# Texts that are encoded together, on all processors.
_BATCH_CHARACTERS = 1_000_000
_BATCH_DOCUMENTS = 1_000


@dataclass(slots=True)
class WrittenTokens:
    """Counts of the written corpus, and the first tokens of its first and last document for a check."""

    documents: int = 0
    tokens: int = 0
    first: bytes = b""
    last: bytes = b""


class TokenFiles:
    """The files of a new shard in a directory, without its suffix array. `written` counts what was added."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self._directory = directory
        self._width = WIDTH[tokenizer.dtype]
        self._code = TYPE_CODE[tokenizer.dtype]
        self._separator = b"\xff" * self._width
        self._counts: Counter[int] = Counter()
        self._size = self._metadata_size = 0
        self.written = WrittenTokens()

    def __enter__(self) -> "TokenFiles":
        self._tokenized, self._offset = self._new("tokenized"), self._new("offset")
        self._metadata, self._metaoff = self._new("metadata"), self._new("metaoff")
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokenized, self._offset, self._metadata, self._metaoff):
            file.close()

    def _new(self, kind: str) -> BinaryIO:
        return (self._directory / f"{kind}.0").open("wb")

    def add(self, content: bytes, line: bytes) -> None:
        """Add a document: its tokens after a separator, and its metadata as a line of JSON."""
        self._tokenized.write(content)
        self._metadata.write(line)
        self._offset.write(self._size.to_bytes(8, "little"))
        self._metaoff.write(self._metadata_size.to_bytes(8, "little"))
        self._size += len(content)
        self._metadata_size += len(line)
        self._counts.update(array(self._code, content))
        tokens = content[self._width : 9 * self._width]
        self.written.first = self.written.first or tokens
        self.written.last = tokens
        self.written.documents += 1
        self.written.tokens = self._size // self._width

    def add_texts(self, documents: list[CorpusDocument], encoded: list[bytes]) -> None:
        """Add those that have tokens."""
        for document, tokens in zip(documents, encoded, strict=True):
            row = {"path": document.path, "linenum": document.line, "metadata": document.metadata}
            if tokens:
                self.add(self._separator + tokens, orjson.dumps(row) + b"\n")

    def write_unigrams(self) -> None:
        """Write lines `id count`. A byte index has lines `count`: there the engine reads ids as characters."""
        if self._width == 1:
            lines = [f"{self._counts[one]}\n" for one in range(256)]
        else:
            lines = [f"{one} {count}\n" for one, count in sorted(self._counts.items())]
        (self._directory / "unigram.0").write_text("".join(lines))


def write_tokens(
    directory: Path, corpus: Corpus, tokenizer: Tokenizer, report: Report
) -> WrittenTokens:
    with TokenFiles(directory, tokenizer) as files:
        for batch in _batches(corpus):
            files.add_texts(batch, tokenizer.encode_for_disk([document.text for document in batch]))
            written = files.written
            report(
                "tokens",
                corpus.read_bytes / max(1, corpus.size),
                f"{written.documents:,} documents, {written.tokens:,} tokens",
            )
        files.write_unigrams()
    if not files.written.documents:
        raise BuildError("The corpus is empty: no document has a text")
    return files.written


def _batches(corpus: Corpus) -> Iterator[list[CorpusDocument]]:
    batch: list[CorpusDocument] = []
    size = 0
    for document in corpus:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
