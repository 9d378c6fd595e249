"""The shards of an index's directories, beside the package's own view of them."""

import os
from bisect import bisect_right

from app.infini_gram import manifest as manifests
from app.infini_gram.declarations import WIDTH, Declaration
from app.infini_gram.manifest import Manifest, ManifestError

_OFFSET_BYTES = 8


def read_manifests(declaration: Declaration) -> list[Manifest]:
    """The manifests of the directories, which have one tokenizer with those of removed documents.

    Raises ManifestError.
    """
    found = [manifests.read(path) for path in declaration.all_paths]
    for path, manifest in zip(declaration.all_paths, found, strict=True):
        for name in ("token_dtype", "tokenizer_sha256", "vocab_size", "end_id"):
            ours, first = getattr(manifest, name), getattr(found[0], name)
            if ours != first:
                raise ManifestError(
                    f"{path} does not fit {declaration.path}: its {name} is {ours}, not {first}"
                )
    return found[: len(declaration.paths)]


class Shard:
    """A shard's tokens, suffix array and documents, read at single places.

    A pointer is a byte offset into the tokens; documents are numbered from 0 within the shard.
    """

    def __init__(self, manifest: Manifest, number: int) -> None:
        self.size = manifest.files[f"tokenized.{number}"].size
        self.tokens = self.size // WIDTH[manifest.token_dtype]
        self._width = WIDTH[manifest.token_dtype]
        self._pointer_width = manifest.pointer_width(number)
        self._number = number
        self._files: dict[str, int] = {}
        self._metadata_size = 0
        if "metadata" in manifest.kinds:
            self._metadata_size = manifest.files[f"metadata.{number}"].size
        self.documents = manifest.files[f"offset.{number}"].size // _OFFSET_BYTES

    def open(self, directory: int) -> list[int]:
        """Return the descriptors, which the caller closes."""
        kinds = ["tokenized", "table", "offset"]
        if self._metadata_size:
            kinds += ["metadata", "metaoff"]
        for kind in kinds:
            name = f"{kind}.{self._number}"
            self._files[kind] = os.open(name, os.O_RDONLY, dir_fd=directory)
        return list(self._files.values())

    def pointer(self, rank: int) -> int:
        entry = os.pread(self._files["table"], self._pointer_width, rank * self._pointer_width)
        return int.from_bytes(entry, "little")

    def pointers(self, start: int, end: int) -> list[int]:
        """The pointers of the ranks [start, end)."""
        width = self._pointer_width
        block = os.pread(self._files["table"], (end - start) * width, start * width)
        return [
            int.from_bytes(block[place : place + width], "little")
            for place in range(0, len(block), width)
        ]

    def token(self, pointer: int) -> bytes:
        return os.pread(self._files["tokenized"], self._width, pointer)

    def document_at(self, pointer: int) -> int:
        """The document that has the pointer in it; its separator belongs to it."""
        return bisect_right(range(self.documents), pointer, key=self._offset) - 1

    def bounds(self, document: int) -> tuple[int, int]:
        """The document's separator and tokens: [start, end) of pointers."""
        last = document + 1 == self.documents
        return self._offset(document), self.size if last else self._offset(document + 1)

    def content(self, document: int) -> bytes:
        """The document's separator and tokens."""
        start, end = self.bounds(document)
        return os.pread(self._files["tokenized"], end - start, start)

    def metadata(self, document: int) -> bytes:
        """The document's line of JSON; empty if the index has none."""
        if not self._metadata_size:
            return b""
        last = document + 1 == self.documents
        start = self._offset(document, "metaoff")
        end = self._metadata_size if last else self._offset(document + 1, "metaoff")
        return os.pread(self._files["metadata"], end - start, start)

    def _offset(self, document: int, kind: str = "offset") -> int:
        entry = os.pread(self._files[kind], _OFFSET_BYTES, document * _OFFSET_BYTES)
        return int.from_bytes(entry, "little")
