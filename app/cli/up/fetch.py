"""Download a model's files from Hugging Face with its own client, resumable and pinned."""

import sys
from collections.abc import Callable
from os import environ
from pathlib import Path

from app.cli.up import processes
from app.cli.up.processes import StartError
from app.core.program import argument
from app.inference.model_repository import MODEL_FILES, ModelSource

_COMPLETE = ".complete"


async def fetch(
    source: ModelSource, weights: Path, log_file: Path, report: Callable[[str], None]
) -> None:
    """Download the files of a Hugging Face model into `weights`, if they are not there.

    The first download pins the revision: later runs use the same files, without a network.
    Raises StartError.
    """
    marker = weights / _COMPLETE
    if marker.exists() and marker.read_text() == source.revision:
        return
    log_start = processes.begin_log(log_file)
    include = [argument for pattern in MODEL_FILES for argument in ("--include", pattern)]
    hf = [sys.executable, "-Pm", "huggingface_hub.cli.hf", "download", source.repository_id]
    process = processes.spawn(
        [*hf, f"--revision={source.revision}", *include, "--local-dir", weights],
        log_file=log_file,
        env={**environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_COLOR": "1"},
    )
    status = await processes.run_to_end(
        process, lambda: report(f"downloading, {_megabytes(weights)} MB so far")
    )
    if status != 0:
        lines = processes.log_text(log_file, log_start).splitlines()
        reason = next((line for line in lines if "Error" in line), "no reason given")
        raise StartError(
            f"{source.repository_id} cannot be downloaded: {reason.strip().rstrip('.')[:300]}. "
            f"A second run goes on where this one ended; without a network, give {argument('MODEL', '<directory>')} "
            f"(log: {log_file})."
        )
    marker.write_text(source.revision)


def _megabytes(directory: Path) -> int:
    files = (file for file in directory.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files) // 1_000_000
