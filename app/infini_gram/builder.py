"""Builds an index of a corpus, completely or not at all.

The tokens are written here, with the tokenizer of the index; the package's own indexer then makes
the suffix array over them (`infini_gram/indexing.py`). The build uses a hidden directory beside
the index, which is renamed at the end.

The files of a shard, as the engine reads them (little-endian):
`tokenized` the tokens, each document after a separator of 0xff bytes; `offset` the position of each
document in it, 8 bytes each; `metadata` a JSON line for each document; `metaoff` the position of
each line; `unigram` the count of each token; `table` the suffix array.
"""

import contextlib
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import orjson

from app.core.errors import EngineError
from app.infini_gram.corpus import Corpus, CorpusDocument, Split
from app.infini_gram.declarations import BYTES, Declaration
from app.infini_gram.engine import MISSING_PACKAGE, Engine
from app.infini_gram.manifest import FORMAT, KINDS, WIDTH, Manifest, entry_of
from app.infini_gram.tokenizer import Tokenizer, open_tokenizer

GIB = 1 << 30
# Texts that are encoded together, on all processors.
_BATCH_CHARACTERS = 1_000_000
_BATCH_DOCUMENTS = 1_000
# Bytes of memory for each byte of tokens: the indexer's own figures, by which it divides the work.
_MEMORY_FACTOR = {"u8": 12, "u16": 8}
_BASE_MEMORY = 300_000_000  # Python, numpy, a batch of texts
_BASE_DISK = 20_000_000
_MIN_BYTES_PER_TOKEN = 3  # of text: a lower bound for common tokenizers
_SINGLE_CPU_BYTES = 2_000_000  # bytes of tokens that one processor indexes in a moment
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# Called from time to time with the step, its progress (0 to 1) and a detail.
Report = Callable[[str, float, str], None]


class BuildError(Exception):
    """No index was built, and no file is left; the message is one line."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """An index to build in `directory`, which must not exist yet unless `replace` is set.

    `tokenizer` is a path or "bytes"; `end_id` its end-of-text token, if its files do not name one.
    `memory` bounds the indexer, in bytes; `open_files` its open files.
    """

    corpus: Path
    directory: Path
    tokenizer: str = BYTES
    end_id: int | None = None
    split: Split = "file"
    memory: int = GIB
    cpus: int = 2
    open_files: int | None = None
    replace: bool = False


def build(options: BuildOptions, report: Report = lambda *_: None) -> Manifest:
    """Build an index. Raises BuildError, CorpusError, TokenizerError or OSError, and leaves no files."""
    if find_spec("infini_gram") is None:
        raise BuildError(MISSING_PACKAGE)
    tokenizer = open_tokenizer(options.tokenizer, options.end_id)
    corpus = Corpus(options.corpus, options.split)
    if options.directory.exists() and not options.replace:
        raise BuildError(
            f"{options.directory} exists already: choose another name, or --replace it"
        )
    with _hidden_directory(options.directory) as hidden:
        new = hidden / "new"
        new.mkdir()
        _check_before(options, corpus, tokenizer)
        written = _write_tokens(new, corpus, tokenizer, report)
        _check_room(options, new, tokenizer, written.tokens)
        _make_suffix_array(options, new, tokenizer, written.tokens, report)
        manifest = _write_manifest(options, new, tokenizer, written, report)
        _verify(new, written)
        _replace(new, options.directory, hidden / "replaced")
    return manifest


def _replace(new: Path, directory: Path, aside: Path) -> None:
    """Rename the new index; an existing one moves aside, and back if the rename fails.

    Processes that have the old index open keep it.
    """
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
    """A directory beside the index's, removed at the end if it still exists.

    Also removes the directories of builds of the same index that were killed.
    """
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


# --- Room --------------------------------------------------------------------------------------------


def _check_before(options: BuildOptions, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Check an estimate first: a refusal now is better than after an hour."""
    text = corpus.likely_text_bytes
    tokens = text if tokenizer.dtype == "u8" else text // _MIN_BYTES_PER_TOKEN
    _check_room(options, options.directory.parent, tokenizer, tokens, is_estimate=True)


def _check_room(
    options: BuildOptions,
    directory: Path,
    tokenizer: Tokenizer,
    tokens: int,
    *,
    is_estimate: bool = False,
) -> None:
    """Check memory and disk for the suffix array of so many tokens (and for the tokens themselves)."""
    size = tokens * WIDTH[tokenizer.dtype]
    # At its peak the array exists twice: in parts and merged, or merged and whole.
    disk = 2 * tokens * _pointer_width(size) + (size if is_estimate else 0) + _BASE_DISK
    memory = min(options.memory, size * _MEMORY_FACTOR[tokenizer.dtype]) + _BASE_MEMORY
    about = "about " if is_estimate else ""
    free = shutil.disk_usage(directory).free
    if free < disk:
        raise BuildError(
            f"Too little space in {directory}: {about}{_megabytes(disk)} needed for {tokens:,} "
            f"tokens, {_megabytes(free)} free"
        )
    available = _available_memory()
    if available < memory:
        raise BuildError(
            f"Too little memory: {about}{_megabytes(memory)} needed, {_megabytes(available)} "
            "available: close something, or give the indexer less (--memory)"
        )


def _pointer_width(size: int) -> int:
    """Bytes of an entry of the suffix array over so many bytes of tokens: the indexer's formula."""
    return max(1, math.ceil(math.log2(max(2, size)) / 8))


def _available_memory() -> int:
    """Available bytes of the machine, or of the control group if it has fewer."""
    told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(told["MemAvailable"].split()[0]) * 1024
    for limit_file in map(Path, _CGROUP_LIMITS):
        with contextlib.suppress(OSError):
            if (limit := limit_file.read_text().strip()).isdigit():
                available = min(available, int(limit))
    return available


def _megabytes(size: int) -> str:
    return f"{max(1, round(size / 1e6)):,} MB"


# --- Tokens ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Written:
    """Counts of the written corpus, and the first tokens of its first and last document for a check."""

    documents: int = 0
    tokens: int = 0
    first: bytes = b""
    last: bytes = b""


class _Files:
    """Writer of the files of the one shard."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self._directory = directory
        self._width = WIDTH[tokenizer.dtype]
        self._code = "B" if self._width == 1 else "H"
        self._separator = b"\xff" * self._width
        self._counts: Counter[int] = Counter()
        self._size = self._metadata_size = 0
        self.written = _Written()

    def __enter__(self) -> "_Files":
        self._tokenized, self._offset = self._new("tokenized"), self._new("offset")
        self._metadata, self._metaoff = self._new("metadata"), self._new("metaoff")
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokenized, self._offset, self._metadata, self._metaoff):
            file.close()

    def _new(self, kind: str) -> BinaryIO:
        return (self._directory / f"{kind}.0").open("wb")

    def add(self, documents: list[CorpusDocument], encoded: list[bytes]) -> None:
        """Write documents with their tokens; documents without tokens are left out."""
        offsets, metaoffs = array("Q"), array("Q")
        for document, tokens in zip(documents, encoded, strict=True):
            if not tokens:
                continue
            row = {"path": document.path, "linenum": document.line, "metadata": document.metadata}
            line = orjson.dumps(row) + b"\n"
            content = self._separator + tokens
            self._tokenized.write(content)
            self._metadata.write(line)
            offsets.append(self._size)
            metaoffs.append(self._metadata_size)
            self._size += len(content)
            self._metadata_size += len(line)
            self._counts.update(array(self._code, content))
            self.written.first = self.written.first or tokens[: 8 * self._width]
            self.written.last = tokens[: 8 * self._width]
        self._offset.write(offsets.tobytes())
        self._metaoff.write(metaoffs.tobytes())
        self.written.documents += len(offsets)
        self.written.tokens = self._size // self._width

    def write_unigrams(self) -> None:
        """Write lines `id count`. A byte index has lines `count`: there the engine reads ids as characters."""
        if self._width == 1:
            lines = [f"{self._counts[one]}\n" for one in range(256)]
        else:
            lines = [f"{one} {count}\n" for one, count in sorted(self._counts.items())]
        (self._directory / "unigram.0").write_text("".join(lines))


def _write_tokens(
    directory: Path, corpus: Corpus, tokenizer: Tokenizer, report: Report
) -> _Written:
    with _Files(directory, tokenizer) as files:
        for batch in _batches(corpus):
            files.add(batch, tokenizer.encode_for_disk([document.text for document in batch]))
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


# --- The suffix array --------------------------------------------------------------------------------

# The indexer's log text for each step, and the path that grows during it.
_STEPS = (("make-part", "parts-0"), ("merge", "merged-0"), ("concat", "table.0"))


def _make_suffix_array(
    options: BuildOptions, directory: Path, tokenizer: Tokenizer, tokens: int, report: Report
) -> None:
    """Run the package's indexer over the written tokens."""
    size = tokens * WIDTH[tokenizer.dtype]
    log_file = directory / "build.log"
    # The indexer runs shell commands with this path, and replaces words in it: use a plain path.
    with tempfile.TemporaryDirectory(prefix="infini-gram-", dir=_plain_directory()) as plain:
        link = Path(plain) / "build"
        link.symlink_to(directory.absolute(), target_is_directory=True)
        command = [sys.executable, "-I", "-u", "-m", "infini_gram.indexing"]
        command += ["--data_dir", str(link), "--save_dir", str(link), "--temp_dir", str(link)]
        command += ["--token_dtype", tokenizer.dtype]
        command += ["--cpus", str(1 if size < _SINGLE_CPU_BYTES else options.cpus)]
        command += ["--mem", str(max(1, options.memory // GIB))]
        command += ["--ulimit", str(options.open_files or _max_open_files())]
        with log_file.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 # our own arguments
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                _report_step(directory, log_file, tokens * _pointer_width(size), report)
                time.sleep(0.05)
        finally:
            _end(process)
    if process.returncode != 0 or not (directory / "table.0").is_file():
        lines = [line.strip() for line in _log_text(log_file).splitlines() if line.strip()]
        raise BuildError(
            f"The indexer failed (status {process.returncode}): {' | '.join(lines[-3:])}"
        )
    log_file.unlink()


def _report_step(directory: Path, log_file: Path, expected: int, report: Report) -> None:
    text = _log_text(log_file)
    begun = [(name, output) for name, output in _STEPS if f"({name})" in text]
    if begun:
        name, output = begun[-1]
        report(f"suffix array, {name}", min(1.0, _size(directory / output) / expected), "")


def _size(path: Path) -> int:
    """Bytes of a file, or of the files of a directory; either may disappear meanwhile."""
    with contextlib.suppress(OSError):
        if path.is_dir():
            return sum(file.stat().st_size for file in path.iterdir())
        return path.stat().st_size
    return 0


def _log_text(log_file: Path) -> str:
    return log_file.read_bytes()[-20_000:].decode(errors="replace")


def _plain_directory() -> str:
    """A temporary directory whose path has no characters that a shell interprets."""
    chosen = tempfile.gettempdir()
    return chosen if re.fullmatch(r"[A-Za-z0-9/._-]+", chosen) else "/tmp"  # noqa: S108


def _max_open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its children, if it has not ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- The end -----------------------------------------------------------------------------------------


def _write_manifest(
    options: BuildOptions, directory: Path, tokenizer: Tokenizer, written: _Written, report: Report
) -> Manifest:
    """Add the tokenizer and the manifest to the files."""
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


def _verify(directory: Path, written: _Written) -> None:
    """Open the index and find its first and last tokens: the indexer has failed silently before."""
    inside = directory / "tokenizer.json"
    tokenizer = str(inside) if inside.exists() else BYTES
    engine = Engine(Declaration(directory.name, directory, tokenizer))
    code = "B" if tokenizer == BYTES else "H"
    for tokens in (written.first, written.last):
        if not engine.count(list(array(code, tokens))).count:
            raise EngineError("The new index does not find what was put into it.")
