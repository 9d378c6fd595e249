"""Manifest of an index, stored beside its files, and the checks of the files against it.

The engine maps the files and trusts them: it crashes on a truncated file and on the wrong width of a
token, and answers wrongly on an altered file. So every file is checked here first.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.core.program import PROGRAM
from app.infini_gram.declarations import BYTES, MAX_VOCABULARY, WIDTH, Declaration, TokenDtype

MANIFEST = "manifest.json"
# Files with verified checksums, so that the next start does not read them all again.
VERIFIED = "verified.json"
FORMAT = 1
# The files of a shard; `.0`, `.1`, ... follow. The engine works without the second row, which an
# index of another indexer may lack.
NEEDED = ("tokenized", "table", "offset")
KINDS = (*NEEDED, "metadata", "metaoff", "unigram")
_OFFSET_BYTES = 8
_BLOCK = 1 << 20

# Called with the checked bytes and the total; any exception that it raises ends the check.
Report = Callable[[int, int], None]


class ManifestError(Exception):
    """The index must not be opened; the message is one line that names the file."""


class FileEntry(BaseModel):
    """One file's size in bytes, and its checksum."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """`manifest.json`. `tokens` counts the separators before the documents, as the engine does.

    `tokenizer_sha256` is null for bytes. `end_id` is the end of a document in responses.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int
    token_dtype: TokenDtype
    vocab_size: int = Field(ge=1, le=MAX_VOCABULARY)
    end_id: int = Field(ge=0)
    tokenizer_sha256: str | None
    shards: int = Field(ge=1, le=10_000)
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    built_with: str = ""
    files: dict[str, FileEntry]

    @model_validator(mode="after")
    def _check(self) -> "Manifest":
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known here (but {FORMAT})")
        most = 2 ** (8 * WIDTH[self.token_dtype]) - 1  # which separates documents
        if not self.end_id < self.vocab_size <= most:
            raise ValueError("vocab_size, end_id and token_dtype do not fit together")
        expected = {f"{kind}.{shard}" for kind in self.kinds for shard in range(self.shards)}
        if set(self.files) != expected:
            wrong = sorted(set(self.files) ^ expected)[0]
            raise ValueError(f"files: {wrong} is missing or unknown")
        self._check_sizes()
        return self

    def _check_sizes(self) -> None:
        """Refuse sizes that contradict each other: the engine would read past an end."""
        width, tokens, documents = WIDTH[self.token_dtype], 0, 0
        for shard in range(self.shards):
            size = {kind: self.files[f"{kind}.{shard}"].size for kind in self.kinds}
            in_shard = size["tokenized"] // width
            tokens += in_shard
            documents += size["offset"] // _OFFSET_BYTES
            if (
                not in_shard
                or size["tokenized"] % width
                or size["offset"] % _OFFSET_BYTES
                or size.get("metaoff", size["offset"]) != size["offset"]
                or size["table"] % in_shard
                or not 1 <= size["table"] // in_shard <= _OFFSET_BYTES
                or 256 ** (size["table"] // in_shard) < size["tokenized"]
            ):
                raise ValueError(f"files: the sizes of shard {shard} do not fit together")
        if (tokens, documents) != (self.tokens, self.documents):
            raise ValueError("files: the sizes do not fit tokens and documents")

    @property
    def kinds(self) -> list[str]:
        has_metadata = {"metadata.0", "metaoff.0"} & set(self.files)
        kinds = [*NEEDED, *(("metadata", "metaoff") if has_metadata else ())]
        return [*kinds, "unigram"] if "unigram.0" in self.files else kinds

    @property
    def shard_order(self) -> list[int]:
        """The shards as the engine numbers them: it sorts the names of the files, 10 before 2."""
        return sorted(range(self.shards), key=str)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def pointer_width(self, shard: int) -> int:
        tokens = self.files[f"tokenized.{shard}"].size // WIDTH[self.token_dtype]
        return self.files[f"table.{shard}"].size // tokens

    def write(self, directory: Path) -> None:
        (directory / MANIFEST).write_bytes(
            orjson.dumps(self.model_dump(), option=orjson.OPT_INDENT_2) + b"\n"
        )


def read(directory: Path) -> Manifest:
    file = directory / MANIFEST
    if not directory.is_dir():
        raise ManifestError(f"{directory} is not a directory")
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise ManifestError(
            f"{file} is missing: build the index with `{PROGRAM} index build`, or take one that "
            f"is there with `{PROGRAM} index adopt`"
        ) from None
    except OSError as error:
        raise ManifestError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ManifestError(f"{file}: {place + ': ' if place else ''}{first['msg']}") from error


def version_of(found: Sequence[Manifest]) -> int:
    """28 bits of a hash of all files' checksums."""
    sums = "".join(one.files[name].sha256 for one in found for name in sorted(one.files))
    return int(hashlib.sha256(sums.encode()).hexdigest()[:7], 16)


def verify(directory: Path, *, checksums: bool = True, report: Report | None = None) -> Manifest:
    """Check sizes, and checksums: seconds for each gigabyte. Raises ManifestError."""
    manifest = read(directory)
    check_sizes(directory, manifest)
    if checksums:
        check_contents(directory, manifest, list(manifest.files), report)
    return manifest


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Check that every file exists with its size, and that the engine would read no others."""
    for name, entry in manifest.files.items():
        file = directory / name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise ManifestError(f"{file} is missing") from None
        except OSError as error:
            raise ManifestError(f"{file} cannot be read: {error.strerror}") from error
        if not file.is_file():
            raise ManifestError(f"{file} is no file")
        if size != entry.size:
            raise ManifestError(f"{file} has {size} bytes, and had {entry.size} when it was built")
    for file in directory.iterdir():
        if file.name not in manifest.files and any(kind in file.name for kind in KINDS):
            raise ManifestError(f"{file} is no file of this index, and the engine would read it")


def check_contents(
    directory: Path, manifest: Manifest, names: list[str], report: Report | None = None
) -> None:
    total = sum(manifest.files[name].size for name in names)
    done = 0
    for name in names:
        file = directory / name
        digest = hashlib.sha256()
        try:
            for block in _blocks(file):
                digest.update(block)
                done += len(block)
                if report:
                    report(done, total)
        except OSError as error:
            raise ManifestError(f"{file} cannot be read: {error.strerror}") from error
        if digest.hexdigest() != manifest.files[name].sha256:
            raise ManifestError(f"{file} was altered: its checksum is not the one of the build")


def check_declaration(
    declaration: Declaration, path: Path, manifest: Manifest, sha256: str | None
) -> None:
    has_bytes = declaration.tokenizer == BYTES
    if manifest.tokenizer_sha256 == sha256 and has_bytes == (WIDTH[manifest.token_dtype] == 1):
        return
    if has_bytes:
        problem = "was built with a tokenizer, and is declared as bytes"
    elif manifest.tokenizer_sha256 is None:
        problem = f"was built of bytes, and is declared with {declaration.tokenizer}"
    else:
        problem = f"was built with another tokenizer than {declaration.tokenizer}"
    raise ManifestError(f"{path} {problem}")


def entry_of(file: Path) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    for block in _blocks(file):
        digest.update(block)
        size += len(block)
    return FileEntry(size=size, sha256=digest.hexdigest())


def unverified(directory: Path, manifest: Manifest) -> list[str]:
    """Files that changed since their last verification, or that never had one."""
    try:
        known: Any = orjson.loads((directory / VERIFIED).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return list(manifest.files)
    if not isinstance(known, dict):
        return list(manifest.files)
    return [
        name
        for name in manifest.files
        if known.get(name) != _stamp(directory / name, manifest.files[name])
    ]


def remember_verified(directory: Path, manifest: Manifest) -> None:
    """Store that all checksums are right; no effect in a read-only directory."""
    stamps = {name: _stamp(directory / name, entry) for name, entry in manifest.files.items()}
    new = directory / f"{VERIFIED}.{os.getpid()}.new"
    try:
        new.write_bytes(orjson.dumps(stamps, option=orjson.OPT_INDENT_2))
        new.replace(directory / VERIFIED)
    except OSError:
        new.unlink(missing_ok=True)


def _stamp(file: Path, entry: FileEntry) -> list[Any]:
    status = file.stat()
    return [entry.sha256, status.st_size, status.st_mtime_ns, status.st_ino]


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        while block := source.read(_BLOCK):
            yield block
