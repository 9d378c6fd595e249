"""The shards of an index's directories, beside the package's own view of them."""

import os

from app.infini_gram import manifest as manifests
from app.infini_gram.declarations import WIDTH, Declaration
from app.infini_gram.manifest import Manifest, ManifestError


def read_manifests(declaration: Declaration) -> list[Manifest]:
    """The manifests of the directories, which have one tokenizer. Raises ManifestError."""
    found = [manifests.read(path) for path in declaration.paths]
    for path, manifest in zip(declaration.paths, found, strict=True):
        for name in ("token_dtype", "tokenizer_sha256", "vocab_size", "end_id"):
            ours, first = getattr(manifest, name), getattr(found[0], name)
            if ours != first:
                raise ManifestError(
                    f"{path} does not fit {declaration.path}: its {name} is {ours}, not {first}"
                )
    return found


class Shard:
    """A shard's tokens and suffix array, read at single places."""

    def __init__(self, manifest: Manifest, number: int) -> None:
        self.size = manifest.files[f"tokenized.{number}"].size
        self.tokens = self.size // WIDTH[manifest.token_dtype]
        self._width = WIDTH[manifest.token_dtype]
        self._pointer_width = manifest.pointer_width(number)
        self._number = number
        self._tokenized = self._table = -1

    def open(self, directory: int) -> tuple[int, int]:
        """Return the descriptors, which the caller closes."""
        self._tokenized = os.open(f"tokenized.{self._number}", os.O_RDONLY, dir_fd=directory)
        self._table = os.open(f"table.{self._number}", os.O_RDONLY, dir_fd=directory)
        return self._tokenized, self._table

    def pointer(self, rank: int) -> int:
        entry = os.pread(self._table, self._pointer_width, rank * self._pointer_width)
        return int.from_bytes(entry, "little")

    def token(self, pointer: int) -> bytes:
        return os.pread(self._tokenized, self._width, pointer)
