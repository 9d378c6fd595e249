"""The demo index: the text that the demo model was trained on, indexed on the first start.

The text is the library of the running Python (models/demo/corpus.py), so no download is needed; the
committed weights were trained on CPython 3.11's.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from app.cli.up import processes
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.core.program import ROOT
from app.infini_gram.declarations import DeclarationError, read_declarations
from app.infini_gram.manifest import ManifestError, verify

NAME = "demo"
_MODEL = ROOT / "models" / "demo"
_TOKENIZER = _MODEL / "1" / "tokenizer.json"
_DESCRIPTION = "The demo model's training text: Python's standard library."


async def prepare(data: Path, progress: Progress) -> Path | None:
    """Return the file that declares the demo index, which is built if it is absent or incomplete.

    A failure is reported, and None returned: the service works without the index.
    """
    file = data / "indexes.toml"
    if not await asyncio.to_thread(_is_good, file):
        try:
            async with progress.step("Demo index", done="is built") as step:
                await _build(data, file, step.report)
        except StartError as error:
            progress.line(f"  Demo index is not built: {error}")
    return file if file.exists() else None


def _is_good(file: Path) -> bool:
    try:
        found = [one for one in read_declarations(file) if one.name == NAME]
        manifest = verify(found[0].path, checksums=False) if found else None
    except (DeclarationError, ManifestError):
        return False
    expected = hashlib.sha256(_TOKENIZER.read_bytes()).hexdigest()
    return manifest is not None and manifest.tokenizer_sha256 == expected


async def _build(data: Path, file: Path, report: Callable[[str], None]) -> None:
    """Raises StartError with the last lines of the failed program."""
    log_file = data / "logs" / "demo_index.log"
    corpus = data / "demo.jsonl"
    try:
        await _run([_MODEL / "corpus.py", corpus], log_file, report)
        command: list[str | Path] = ["-m", "app", "index", "build", corpus, "--name", NAME]
        command += ["--replace", "--out", data / "indexes", "--file", file]
        command += ["--tokenizer", _TOKENIZER, "--description", _DESCRIPTION]
        await _run(command, log_file, report)
    finally:
        corpus.unlink(missing_ok=True)


async def _run(
    arguments: Sequence[str | Path], log_file: Path, report: Callable[[str], None]
) -> None:
    log_start = processes.begin_log(log_file)
    process = processes.spawn(
        [sys.executable, *arguments], log_file=log_file, env=os.environ, cwd=ROOT
    )
    status = await processes.run_to_end(
        process, lambda: report(processes.last_lines(log_file, log_start, 1))
    )
    if status != 0:
        reason = processes.last_lines(log_file, log_start, 1)
        raise StartError(f"{reason[:300]} (log: {log_file})")
