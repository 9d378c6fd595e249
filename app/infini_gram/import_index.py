"""Imports an index that the package's own indexer built: checks it, and writes its manifest."""

import os
import random
import re
from array import array
from pathlib import Path

from pydantic import ValidationError

from app.infini_gram.build_options import Report
from app.infini_gram.declarations import TYPE_CODE, WIDTH, Declaration, TokenDtype
from app.infini_gram.engine import Engine
from app.infini_gram.manifest import (
    FORMAT,
    KINDS,
    MANIFEST,
    FileEntry,
    Manifest,
    ManifestError,
    entry_of,
)
from app.infini_gram.suffix_array import pointer_width
from app.infini_gram.tokenizer import Tokenizer, TokenizerError, open_tokenizer

# Sampled entries of each shard: enough to notice another token width or another order.
_SAMPLED_RANKS = 1_000
_SAMPLED_BYTES = 64_000_000
_COMPARED_BYTES = 64

_FILE = re.compile(rf"({'|'.join(KINDS)})\.\d+")


def adopt(declaration: Declaration, end_id: int | None, report: Report) -> list[Manifest]:
    """Write the manifests of the declared index's directories, except those that have one.

    Raises ManifestError, TokenizerError or OSError, and leaves no new manifest.
    """
    new = [path for path in declaration.paths if not (path / MANIFEST).exists()]
    if not new:
        raise ManifestError(
            f"{declaration.path / MANIFEST} is there: the index needs no adoption; declare it"
        )
    tokenizer = open_tokenizer(declaration.tokenizer, end_id)
    try:
        for path in new:
            _manifest_of(path, tokenizer, report).write(path)
        return Engine(declaration).manifests
    except BaseException:
        for path in new:
            (path / MANIFEST).unlink(missing_ok=True)
        raise


def _manifest_of(directory: Path, tokenizer: Tokenizer, report: Report) -> Manifest:
    files = _files(directory)
    dtype = _token_dtype(directory, tokenizer)
    shards = sum(name.startswith("tokenized.") for name in files)
    entries: dict[str, FileEntry] = {}
    for number, name in enumerate(files):
        report("reading", number / len(files), name)
        entries[name] = entry_of(directory / name)
    width = WIDTH[dtype]
    try:
        manifest = Manifest(
            format=FORMAT,
            token_dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            tokenizer_sha256=tokenizer.sha256,
            shards=shards,
            tokens=sum(entries[f"tokenized.{n}"].size // width for n in range(shards)),
            documents=sum(entries[f"offset.{n}"].size // 8 for n in range(shards)),
            built_with="others",
            files=entries,
        )
    except (ValidationError, KeyError) as error:
        problem = (
            error.errors()[0]["msg"] if isinstance(error, ValidationError) else "it is missing"
        )
        raise ManifestError(f"{directory} is no index of {dtype} tokens: {problem}") from None
    for shard in range(shards):
        report("looking at", shard / shards, f"shard {shard}")
        _check_shard(directory, manifest, shard, tokenizer)
    return manifest


def _token_dtype(directory: Path, tokenizer: Tokenizer) -> TokenDtype:
    """The width of a token that the sizes show: the array has a pointer for each token."""
    if tokenizer.dtype == "u8":
        return "u8"
    size, table = (_size(directory / f"{kind}.0") for kind in ("tokenized", "table"))
    shown: list[TokenDtype] = [
        dtype
        for dtype in ("u16", "u32")
        if size and table == size // WIDTH[dtype] * pointer_width(size)
    ]
    if shown == ["u16"] and tokenizer.dtype == "u32":
        raise TokenizerError(
            f"{directory} holds two bytes a token, and the tokenizer has ids up to "
            f"{tokenizer.vocab_size - 1}: it was built with another one"
        )
    return shown[0] if shown else tokenizer.dtype


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _files(directory: Path) -> list[str]:
    if not directory.is_dir():
        raise ManifestError(f"{directory} is not a directory")
    found = sorted(one.name for one in directory.iterdir() if _FILE.fullmatch(one.name))
    if not any(name.startswith("tokenized.") for name in found):
        raise ManifestError(f"{directory} holds no index: it has no file tokenized.0")
    return found


def _check_shard(directory: Path, manifest: Manifest, shard: int, tokenizer: Tokenizer) -> None:
    tokenized, table = directory / f"tokenized.{shard}", directory / f"table.{shard}"
    width = WIDTH[manifest.token_dtype]
    separator = 256**width - 1
    with tokenized.open("rb") as file:
        ids = array(TYPE_CODE[manifest.token_dtype], file.read(_SAMPLED_BYTES))
    if ids[0] != separator:
        raise ManifestError(f"{tokenized} does not begin with a separator of {width} bytes")
    wrong = next((one for one in set(ids) if tokenizer.vocab_size <= one != separator), None)
    if wrong is not None:
        raise ManifestError(
            f"{tokenized} holds the token {wrong}, which the tokenizer does not know"
        )
    if not _is_sorted(tokenized, table, manifest, shard):
        raise ManifestError(f"{table} does not sort the tokens of {tokenized.name}")
    _check_unigrams(directory / f"unigram.{shard}", manifest, shard)


def _is_sorted(tokenized: Path, table: Path, manifest: Manifest, shard: int) -> bool:
    width, pointer_width = WIDTH[manifest.token_dtype], manifest.pointer_width(shard)
    size = manifest.files[tokenized.name].size
    ranks = range(size // width - 1)
    count = min(len(ranks), _SAMPLED_RANKS)
    ranks_to_see = random.Random(0).sample(ranks, count)  # noqa: S311 # no secret
    with tokenized.open("rb") as texts, table.open("rb") as pointers:
        for rank in ranks_to_see:
            pair = os.pread(pointers.fileno(), 2 * pointer_width, rank * pointer_width)
            suffixes = []
            for entry in (pair[:pointer_width], pair[pointer_width:]):
                pointer = int.from_bytes(entry, "little")
                if pointer % width or pointer >= size:
                    return False
                suffixes.append(os.pread(texts.fileno(), _COMPARED_BYTES, pointer))
            if suffixes[0] > suffixes[1]:
                return False
    return True


def _check_unigrams(file: Path, manifest: Manifest, shard: int) -> None:
    if file.name not in manifest.files:
        return
    rows = [line.split() for line in file.read_text().splitlines()]
    if WIDTH[manifest.token_dtype] == 1 and any(len(row) != 1 for row in rows):
        raise ManifestError(
            f"{file} names bytes, which the engine reads as characters: remove it (the engine "
            "counts by itself)"
        )
    try:
        total = sum(int(row[-1]) for row in rows)
    except (ValueError, IndexError):
        raise ManifestError(f"{file} is no list of counts") from None
    if total != manifest.files[f"tokenized.{shard}"].size // WIDTH[manifest.token_dtype]:
        raise ManifestError(f"{file} counts other tokens than there are in the shard: remove it")
