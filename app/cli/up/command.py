"""`python -m app up`: its arguments."""

import argparse
import asyncio
from pathlib import Path

from app.cli.up.served_models import ModelOptions
from app.cli.up.up import UpOptions, up


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("--port", type=int, default=8887, help="port of the API (8887)")
    add("--ui-port", type=int, help="port of the web page (the API's and 1, or any that is free)")
    add("--data", type=Path, default=Path(".data"), help="directory of all data (.data)")
    help_ = "the scripted model instead of vLLM: ready in seconds"
    add("--light", action="store_true", help=help_)
    add("--gpu", action="store_true", help="vLLM on the machine's NVIDIA GPU instead of its CPU")
    add("--model", help="Hugging Face id or local directory to serve as well")
    add("--quantization", help="quantization method of --model")
    add("--max-model-len", type=int, help="longest prompt plus output, tokens")


def _run(options: argparse.Namespace) -> int:
    return asyncio.run(
        up(
            UpOptions(
                port=options.port,
                ui_port=options.ui_port,
                data=options.data,
                light=options.light,
                gpu=options.gpu,
                model=ModelOptions(options.model, options.quantization, options.max_model_len),
            )
        )
    )
