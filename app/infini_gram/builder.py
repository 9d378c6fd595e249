"""Builds an index of a corpus, completely or not at all.

`token_files` writes the tokens, with the tokenizer of the index; the package's own indexer then makes
the suffix array over them (`suffix_array`). The build uses a hidden directory beside
the index, which is renamed at the end.

The files of a shard, as the engine reads them (little-endian):
`tokenized` the tokens, each document after a separator of 0xff bytes; `offset` the position of each
document in it, 8 bytes each; `metadata` a JSON line for each document; `metaoff` the position of
each line; `unigram` the count of each token; `table` the suffix array.
"""

import contextlib
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from app.core.errors import EngineError
from app.core.memory import available_memory
from app.infini_gram.build_options import BuildError, BuildOptions, Report
from app.infini_gram.corpus import Corpus
from app.infini_gram.declarations import BYTES, TYPE_CODE, WIDTH, Declaration
from app.infini_gram.engine import MISSING_PACKAGE, Engine
from app.infini_gram.manifest import FORMAT, KINDS, Manifest, entry_of, remember_verified
from app.infini_gram.suffix_array import array_bytes, make_suffix_array
from app.infini_gram.token_files import WrittenTokens, write_tokens
from app.infini_gram.tokenizer import Tokenizer, open_tokenizer

# Bytes of memory for each byte of tokens: the indexer's own figures, by which it divides the work.
_MEMORY_FACTOR = {"u8": 12, "u16": 8, "u32": 8}
_BASE_MEMORY = 300_000_000  # Python, numpy, a batch of texts
_BASE_DISK = 20_000_000
_MIN_BYTES_PER_TOKEN = 3  # of text: a lower bound for common tokenizers

Writer = Callable[[Path], WrittenTokens]


def build(options: BuildOptions, report: Report = lambda *_: None) -> Manifest:
    """Build an index. Raises BuildError, CorpusError, TokenizerError or OSError, and leaves no files."""
    if find_spec("infini_gram") is None:
        raise BuildError(MISSING_PACKAGE)
    tokenizer = open_tokenizer(options.tokenizer, options.end_id)
    corpus = Corpus(options.corpus, options.split)

    def write(new: Path) -> WrittenTokens:
        _check_estimate(options, corpus, tokenizer)
        return write_tokens(new, corpus, tokenizer, report)

    return build_of(options, tokenizer, write, report)


def build_of(
    options: BuildOptions, tokenizer: Tokenizer, write: Writer, report: Report
) -> Manifest:
    """Build an index of the tokens that `write` puts into a new directory. Raises BuildError or OSError."""
    if options.directory.exists() and not options.replace:
        raise BuildError(
            f"{options.directory} exists already: choose another name, or --replace it"
        )
    with _hidden_directory(options.directory) as hidden:
        new = hidden / "new"
        new.mkdir()
        written = write(new)
        _check_space(options, new, tokenizer, written.tokens)
        make_suffix_array(options, new, tokenizer, written.tokens, report)
        manifest = _write_manifest(options, new, tokenizer, written, report)
        _verify(new, written)
        remember_verified(new, manifest)  # its checksums were made just now
        _replace(new, options.directory, hidden / "replaced")
    return manifest


def _replace(new: Path, directory: Path, aside: Path) -> None:
    """Move an existing index aside; processes that have it open keep it."""
    if not directory.exists():
        new.rename(directory)
        return
    directory.rename(aside)
    try:
        new.rename(directory)
    except BaseException:
        aside.rename(directory)
        raise


@contextlib.contextmanager
def _hidden_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory beside the index; those of killed builds are removed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for left in directory.parent.glob(f".{directory.name}.building-*"):
        number = left.name.rpartition("-")[2]
        if number.isdigit() and not _is_running(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    hidden = directory.with_name(f".{directory.name}.building-{os.getpid()}")
    hidden.mkdir()
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_manifest(
    options: BuildOptions,
    directory: Path,
    tokenizer: Tokenizer,
    written: WrittenTokens,
    report: Report,
) -> Manifest:
    if options.tokenizer != BYTES:
        shutil.copyfile(options.tokenizer, directory / "tokenizer.json")
    files = {}
    for number, kind in enumerate(KINDS):
        report("checksums", number / len(KINDS), "")
        files[f"{kind}.0"] = entry_of(directory / f"{kind}.0")
    try:
        manifest = Manifest(
            format=FORMAT,
            token_dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            tokenizer_sha256=tokenizer.sha256,
            shards=1,
            tokens=written.tokens,
            documents=written.documents,
            built_with=f"infini-gram {version('infini-gram')}",
            files=files,
        )
    except ValueError as error:
        raise BuildError(f"The indexer made a file of a wrong size: {error}") from error
    manifest.write(directory)
    return manifest


def _verify(directory: Path, written: WrittenTokens) -> None:
    """Open the index and find its first and last tokens: the indexer has failed silently before."""
    inside = directory / "tokenizer.json"
    tokenizer = str(inside) if inside.exists() else BYTES
    engine = Engine(Declaration(directory.name, directory, tokenizer))
    for tokens in (written.first, written.last):
        if not engine.count(list(array(TYPE_CODE[engine.token_dtype], tokens))).count:
            raise EngineError("The new index does not find what was put into it.")


def _check_estimate(options: BuildOptions, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Check an estimate first: a refusal now is better than after an hour."""
    text = corpus.likely_text_bytes
    tokens = text if tokenizer.dtype == "u8" else text // _MIN_BYTES_PER_TOKEN
    _check_space(options, options.directory.parent, tokenizer, tokens, is_estimate=True)


def _check_space(
    options: BuildOptions,
    directory: Path,
    tokenizer: Tokenizer,
    tokens: int,
    *,
    is_estimate: bool = False,
) -> None:
    size = tokens * WIDTH[tokenizer.dtype]
    # At its peak the array exists twice: in parts and merged, or merged and whole.
    disk = 2 * array_bytes(size, tokenizer.dtype) + (size if is_estimate else 0) + _BASE_DISK
    memory = min(options.memory, size * _MEMORY_FACTOR[tokenizer.dtype]) + _BASE_MEMORY
    about = "about " if is_estimate else ""
    free = shutil.disk_usage(directory).free
    if free < disk:
        raise BuildError(
            f"Too little space in {directory}: {about}{_megabytes(disk)} needed for {tokens:,} "
            f"tokens, {_megabytes(free)} free"
        )
    available = available_memory()
    if available < memory:
        raise BuildError(
            f"Too little memory: {about}{_megabytes(memory)} needed, {_megabytes(available)} "
            "available: close something, or give the indexer less (--memory)"
        )


def _megabytes(size: int) -> str:
    return f"{max(1, round(size / 1e6)):,} MB"
