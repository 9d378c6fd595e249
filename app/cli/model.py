"""`python -m app model`: downloads a model, and writes its entry of a model repository.

docker-compose serves the repository.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from app.cli.arguments import Run, add_command, add_subcommands
from app.cli.engine_options import ENGINE_OPTION_HELP, engine_option
from app.cli.up import served_models
from app.cli.up.environment import data_directory
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.core.errors import InvalidRequestError
from app.core.program import IS_PACKAGE, ROOT, argument
from app.inference.engine_options import check_engine_options, engine_options
from app.inference.engine_policy import NARROWED
from app.inference.model_repository import (
    ModelRepositoryError,
    ModelSource,
    check_quantization,
    entry_name,
    parse_source,
    write_entry,
)

_INTERRUPTED = 130  # a shell's exit status of SIGINT
# docker-compose serves that of the checkout.
_MODELS = Path("models") if IS_PACKAGE else ROOT / "models"
_OPERATORS = frozenset(
    name for name, one in engine_options().items() if one.access == "profile" or name in NARROWED
) | {"tensor_parallel_size"}
_MISSING = f"give a Hugging Face id or a directory, such as {argument('MODEL', 'Qwen/Qwen2.5-0.5B-Instruct')}."


def configure(parser: argparse.ArgumentParser) -> None:
    actions, data = add_subcommands(parser), data_directory()
    download = add_command(actions, "download", "Only download a model.", _download)
    text = "Write a model's entry for docker-compose, after its download."
    write = add_command(actions, "write", text, _write)
    for action in (download, write):
        action.add_argument("model", help="Hugging Face id (with @revision) or local directory")
        action.add_argument(
            "--data", type=Path, default=data, help=f"directory of downloads ({data})"
        )
    add = write.add_argument
    add("--name", help="the entry's name (the last part of the model's)")
    add("--quantization", help="quantization method, as vLLM names it")
    add("--max-model-len", type=int, help="longest prompt plus output, tokens")
    add("--engine-option", type=engine_option, action="append", default=[], metavar="NAME=VALUE",
        help=ENGINE_OPTION_HELP)  # fmt: skip
    add("--models", type=Path, default=_MODELS, help="the model repository (models)")


def _command(work: Callable[[argparse.Namespace, Progress], Awaitable[None]]) -> Run:
    """Decorator of the commands: they show their progress, and report errors in one line."""

    async def run(options: argparse.Namespace) -> int:
        async with Progress(sys.stdout) as progress:
            try:
                await work(options, progress)
            except (ModelRepositoryError, StartError) as error:
                sys.stderr.write(f"{error}\n")
                return 1
        return 0

    def main(options: argparse.Namespace) -> int:
        try:
            return asyncio.run(run(options))
        except KeyboardInterrupt:
            return _INTERRUPTED

    return main


@_command
async def _download(options: argparse.Namespace, progress: Progress) -> None:
    source = _source(options.model)
    if source.directory is not None:
        raise ModelRepositoryError(
            f"{argument('MODEL', options.model)} is a local directory: there is nothing to download."
        )
    progress.line(f"  in {await served_models.obtain(source, options.data.absolute(), progress)}")


@_command
async def _write(options: argparse.Namespace, progress: Progress) -> None:
    check_quantization(options.quantization, on_cpu=False)
    if options.max_model_len is not None and options.max_model_len < 1:
        raise ModelRepositoryError(
            f"{argument('MAX_MODEL_LEN', options.max_model_len)} must be at least 1."
        )
    engine = _engine(options.engine_option)
    source, name, repository = _source(options.model), options.name, options.models
    if name is not None and entry_name(name) != name:
        raise ModelRepositoryError(
            f"{argument('NAME', name)} must be letters, digits and ._- only, and begin with one of the former."
        )
    entry = repository / (name or source.name)
    if entry.exists() and not (entry / "1" / "weights").exists():
        raise ModelRepositoryError(
            f"{entry} was not written by this command: choose another name with {argument('NAME')}."
        )
    weights = await served_models.obtain(source, options.data.absolute(), progress)
    await asyncio.to_thread(
        write_entry,
        entry,
        weights,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        engine=engine,
        with_files=True,
    )
    progress.line(
        f"  {entry} is written. Serve it, with all of {repository.name}/:\n"
        "    docker-compose --profile gpu up --build --detach --force-recreate"
    )


def _engine(given: list[tuple[str, Any]]) -> dict[str, Any]:
    """The checked options: the operator writes this file, so only the entry's own are refused."""
    try:
        return check_engine_options(dict(given), _OPERATORS, "")
    except InvalidRequestError as error:
        raise ModelRepositoryError(f"--engine-option: {error.detail}") from error


def _source(model: str) -> ModelSource:
    if not model:
        raise ModelRepositoryError(f"MODEL is missing: {_MISSING}")
    return parse_source(model)
