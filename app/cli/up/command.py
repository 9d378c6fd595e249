"""`python -m app up`: its arguments."""

import argparse
import asyncio
import sys
from pathlib import Path

from app.cli.up import gpu
from app.cli.up.environment import data_directory, triton_environment
from app.cli.up.gpu import GpuError
from app.cli.up.install import InstallError
from app.cli.up.served_models import ModelOptions
from app.cli.up.up import UpOptions, up
from app.core.program import IS_PACKAGE

_INTERRUPTED = 130  # a shell's exit status of SIGINT


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    add, data = parser.add_argument, data_directory()
    add("--port", type=int, default=8887, help="port of the API (8887)")
    add("--ui-port", type=int, help="port of the web page (the API's and 1, or any that is free)")
    add("--data", type=Path, default=data, help=f"directory of all data ({data})")
    help_ = "the scripted model instead of vLLM: ready in seconds"
    add("--light", action="store_true", help=help_)
    help_ = "vLLM on the machine's NVIDIA GPU instead of its CPU"
    if IS_PACKAGE:
        help_ += " (default: what the driver shows)"
    add("--gpu", action=argparse.BooleanOptionalAction, help=help_)
    add("--model", help="Hugging Face id or local directory to serve as well")
    add("--quantization", help="quantization method of --model")
    add("--max-model-len", type=int, help="longest prompt plus output, tokens")
    help_ = "Triton's environment"
    if IS_PACKAGE:
        help_ += " (default: one that the first start installs in the user's directory)"
    add("--triton-venv", type=Path, metavar="DIR", help=help_)


def _run(options: argparse.Namespace) -> int:
    try:
        on_gpu, venv = _processor(options), options.triton_venv
        if venv is None and IS_PACKAGE:
            venv = triton_environment(light=options.light, gpu=on_gpu)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (GpuError, InstallError, OSError) as error:
        sys.stderr.write(f"Cannot start: {error}\n")
        return 1
    return asyncio.run(
        up(
            UpOptions(
                port=options.port,
                ui_port=options.ui_port,
                data=options.data,
                light=options.light,
                gpu=on_gpu,
                model=ModelOptions(options.model, options.quantization, options.max_model_len),
                venv=venv,
            )
        )
    )


def _processor(options: argparse.Namespace) -> bool:
    """True for a GPU. The package asks the driver, as make does in a checkout. Raises GpuError."""
    if not IS_PACKAGE or options.light:
        return bool(options.gpu)
    if options.gpu is None:
        chosen, remark = gpu.choose("")
    else:
        chosen, remark = gpu.choose("1" if options.gpu else "0")
    if remark:
        sys.stderr.write(f"{remark}\n")
    return chosen == "gpu"
