"""`python -m app model`: arguments of the commands that `model_commands` runs."""

import argparse
import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from app.cli.arguments import Subcommands, add_command, add_subcommands

_INTERRUPTED = 130  # a shell's exit status of SIGINT
_ROOT = Path(__file__).resolve().parents[2]


def add_to(commands: Subcommands) -> None:
    parser = add_command(commands, "model", "Download models, and write entries to serve them.")
    actions = add_subcommands(parser)
    download = add_command(actions, "download", "Only download a model.", _download)
    write = add_command(
        actions, "write", "Write a model's entry for docker-compose, after its download.", _write
    )
    for action in (download, write):
        action.add_argument("model", help="Hugging Face id (with @revision) or local directory")
        action.add_argument(
            "--data", type=Path, default=Path(".data"), help="directory of downloads (.data)"
        )
    write.add_argument("--name", help="the entry's name (the last part of the model's)")
    write.add_argument("--quantization", help="quantization method, as vLLM names it")
    write.add_argument("--max-model-len", type=int, help="longest prompt plus output, tokens")
    write.add_argument(
        "--models", type=Path, default=_ROOT / "models", help="the model repository (models)"
    )


def _download(options: argparse.Namespace) -> int:
    from app.cli.model_commands import download

    return _run(download(options.model, options.data.absolute()))


def _write(options: argparse.Namespace) -> int:
    from app.cli.model_commands import write
    from app.cli.up.served_models import ModelOptions

    model = ModelOptions(options.model, options.quantization, options.max_model_len)
    return _run(write(model, options.name, options.data.absolute(), options.models))


def _run(command: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(command)
    except KeyboardInterrupt:
        return _INTERRUPTED
