"""The suffix array of a shard, made by the package's own indexer."""

import contextlib
import itertools
import math
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.infini_gram.build_options import GIB, BuildError, BuildOptions, Report
from app.infini_gram.declarations import WIDTH, TokenDtype
from app.infini_gram.tokenizer import Tokenizer

_SINGLE_CPU_BYTES = 2_000_000  # bytes of tokens that one processor indexes in a moment
# The indexer needs 34 GB for any index of u32. It sorts the same bytes as u16, and of its array
# the places at which a token begins are the array of u32: the engine compares bytes.
_SORTED_AS: dict[TokenDtype, TokenDtype] = {"u8": "u8", "u16": "u16", "u32": "u16"}
_COPIED_ENTRIES = 1 << 20
# The indexer's log text for each step, and the path that grows during it.
_STEPS = (("make-part", "parts-0"), ("merge", "merged-0"), ("concat", "table.0"))


def pointer_width(size: int) -> int:
    """Bytes of an entry of the suffix array over so many bytes of tokens: the indexer's formula."""
    return max(1, math.ceil(math.log2(max(2, size)) / 8))


def array_bytes(size: int, dtype: TokenDtype) -> int:
    """Bytes of the array that the indexer makes over so many bytes of tokens."""
    return size // WIDTH[_SORTED_AS[dtype]] * pointer_width(size)


def make_suffix_array(
    options: BuildOptions, directory: Path, tokenizer: Tokenizer, tokens: int, report: Report
) -> None:
    size = tokens * WIDTH[tokenizer.dtype]
    log_file = directory / "build.log"
    # The indexer runs shell commands with this path, and replaces words in it: use a plain path.
    with tempfile.TemporaryDirectory(prefix="infini-gram-", dir=_plain_directory()) as plain:
        link = Path(plain) / "build"
        link.symlink_to(directory.absolute(), target_is_directory=True)
        command = [sys.executable, "-I", "-u", "-m", "infini_gram.indexing"]
        command += ["--data_dir", str(link), "--save_dir", str(link), "--temp_dir", str(link)]
        command += ["--token_dtype", _SORTED_AS[tokenizer.dtype]]
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
        steps = IndexerSteps(directory, log_file, array_bytes(size, tokenizer.dtype), report)
        try:
            while process.poll() is None:
                steps.report_progress()
                time.sleep(0.05)
            steps.report_progress()
        finally:
            _end(process)
    if process.returncode != 0 or not (directory / "table.0").is_file():
        lines = [line.strip() for line in _log_text(log_file).splitlines() if line.strip()]
        raise BuildError(
            f"The indexer failed (status {process.returncode}): {' | '.join(lines[-3:])}"
        )
    log_file.unlink()
    if _SORTED_AS[tokenizer.dtype] != tokenizer.dtype:
        _keep_token_starts(directory / "table.0", pointer_width(size), WIDTH[tokenizer.dtype])


def _keep_token_starts(table: Path, entry_width: int, width: int) -> None:
    """Drop the entries within tokens; `width` is a power of two below 256."""
    selected = bytes(value % width == 0 for value in range(256))
    new = table.with_name("build.array")
    with table.open("rb") as source, new.open("wb") as target:
        while block := source.read(_COPIED_ENTRIES * entry_width):
            are_starts = block[::entry_width].translate(selected)
            entries = struct.iter_unpack(f"{entry_width}s", block)
            target.write(b"".join(entry for (entry,) in itertools.compress(entries, are_starts)))
    new.replace(table)


class IndexerSteps:
    """The indexer's steps, as its log names them. Each is reported, even if it ends between two looks."""

    def __init__(self, directory: Path, log_file: Path, expected: int, report: Report) -> None:
        self._directory = directory
        self._log_file = log_file
        self._expected = expected  # bytes that each step writes
        self._report = report
        self._ended = 0  # steps that were reported as complete

    def report_progress(self) -> None:
        text = _log_text(self._log_file)
        begun = [number for number, (name, _) in enumerate(_STEPS) if f"({name})" in text]
        if not begun:
            return
        for name, _ in _STEPS[self._ended : begun[-1]]:
            self._report(f"suffix array, {name}", 1.0, "")
        self._ended = begun[-1]
        name, output = _STEPS[begun[-1]]
        written = _size(self._directory / output)
        self._report(f"suffix array, {name}", min(1.0, written / self._expected), "")


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        if path.is_dir():
            return sum(file.stat().st_size for file in path.iterdir())
        return path.stat().st_size
    return 0


def _log_text(log_file: Path) -> str:
    return log_file.read_bytes()[-20_000:].decode(errors="replace")


def _plain_directory() -> str:
    chosen = tempfile.gettempdir()
    return chosen if re.fullmatch(r"[A-Za-z0-9/._-]+", chosen) else "/tmp"  # noqa: S108


def _max_open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
