"""Downloads a model, and writes its entry of the model repository that docker-compose serves."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from app.cli.up import served_models
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.cli.up.served_models import ModelOptions
from app.inference.model_repository import (
    ModelRepositoryError,
    ModelSource,
    check_quantization,
    entry_name,
    parse_source,
    write_entry,
)

_FAILED = 1
_MISSING = "give a Hugging Face id or a directory, such as MODEL=Qwen/Qwen2.5-0.5B-Instruct."


async def download(model: str, data: Path) -> int:
    """Download a model's files into the data directory; return the exit status."""
    async with Progress(sys.stdout) as progress:
        return await _reported(_download(model, data, progress))


async def write(options: ModelOptions, name: str | None, data: Path, repository: Path) -> int:
    """Write the entry of a model into `repository`; return the exit status."""
    async with Progress(sys.stdout) as progress:
        return await _reported(_write(options, name, data, repository, progress))


async def _download(model: str, data: Path, progress: Progress) -> None:
    source = _source(model)
    if source.directory is not None:
        raise ModelRepositoryError(
            f"MODEL={model} is a local directory: there is nothing to download."
        )
    progress.line(f"  in {await served_models.obtain(source, data, progress)}")


async def _write(
    options: ModelOptions, name: str | None, data: Path, repository: Path, progress: Progress
) -> None:
    check_quantization(options.quantization, on_cpu=False)
    if options.max_model_len is not None and options.max_model_len < 1:
        raise ModelRepositoryError(f"MAX_MODEL_LEN={options.max_model_len} must be at least 1.")
    source = _source(options.source or "")
    if name is not None and entry_name(name) != name:
        raise ModelRepositoryError(
            f"NAME={name} must be letters, digits and ._- only, and begin with one of the former."
        )
    entry = repository / (name or source.name)
    if entry.exists() and not (entry / "1" / "weights").exists():
        raise ModelRepositoryError(
            f"{entry} was not written by this command: choose another name with NAME=."
        )
    weights = await served_models.obtain(source, data, progress)
    await asyncio.to_thread(
        write_entry,
        entry,
        weights,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        with_files=True,
    )
    progress.line(
        f"  {entry} is written. Serve it, with all of {repository.name}/:\n"
        "    docker-compose --profile gpu up --build --detach --force-recreate"
    )


def _source(model: str) -> ModelSource:
    if not model:
        raise ModelRepositoryError(f"MODEL is missing: {_MISSING}")
    return parse_source(model)


async def _reported(work: Coroutine[Any, Any, None]) -> int:
    try:
        await work
    except (ModelRepositoryError, StartError) as error:
        sys.stderr.write(f"{error}\n")
        return _FAILED
    return 0
