"""`python -m app plan`: its arguments and their help. `plan_command` runs it."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from app.provisioning.sizing.fit import (
    DEFAULT_CONTEXT,
    MAX_BATCH,
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_GPUS,
    MAX_MINUTES,
)
from app.provisioning.sizing.gpus import GPUS
from app.provisioning.sizing.quantization import BY_NAME

_EPILOG = f"""examples:
  python -m app plan models/llama-3-8b
      the GPUs on which the model in this directory fits, and the resources to request
  python -m app plan config.json --gpu a100-80 --gpu l4 --context 8192 --concurrency 32
      whether 32 requests of 8192 tokens (prompt and output) can run at the same time
  python -m app plan config.json --quantization fp8 --json

It needs only config.json. If the directory has weights, their size is taken from their index or
headers. Sizes are per GPU; `tokens` and `requests` are the cache's capacity at a time. The figures
are estimates: docs/plan.md has the formulas, their sources and their limits.

GPUs: {", ".join(GPUS)}

Exit status 2: the input was wrong; one line names the place. Otherwise 0, also if nothing fits."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Calculate on which GPUs a model fits, from its config.json."
    parser = commands.add_parser(
        "plan",
        help=text,
        description=text,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.error = _refuse  # type: ignore[method-assign] # its own prints ten lines of usage first
    parser.add_argument(
        "model", type=Path, help="a config.json, the directory with it, or of a Triton model"
    )
    _add_request(parser)
    _add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", action="append", metavar="NAME", default=[],
        help="a kind of GPU, or several without their memory (a100); can be repeated (all of them)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=_whole(MAX_CONTEXT), metavar="TOKENS",
        help=f"tokens of a request (what the model can, but at most {DEFAULT_CONTEXT})",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=_whole(MAX_CONCURRENCY), metavar="N", default=1,
        help="requests that are to run at the same time (1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-gpus", type=_whole(MAX_GPUS), metavar="N", default=8, help="most GPUs of a node (8)"
    )
    parser.add_argument(
        "--minutes", type=_whole(MAX_MINUTES), metavar="N",
        help="how long it is to serve (60)",
    )  # fmt: skip


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"),
        help="type that the model runs in (its own)",
    )  # fmt: skip
    parser.add_argument(
        "--quantization", choices=tuple(BY_NAME),
        help="compression of weights, if config.json has none",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto",
        help="type of the cache's elements (auto: the model's)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory-utilization", type=_share, metavar="SHARE", default=0.9,
        help="share of each GPU's memory that vLLM may have (0.9)",
    )  # fmt: skip
    parser.add_argument(
        "--max-num-batched-tokens", type=_whole(MAX_BATCH), metavar="N", default=2048,
        help="most tokens of a batch (2048, as inside Triton)",
    )  # fmt: skip


def _whole(high: int) -> Callable[[str], int]:
    """Parser of a whole number from 1 to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = 0
        if not 1 <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from 1 to {high}, not {text[:40]!r}"
            )
        return value

    return read


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"must be above 0, and at most 1 (for example 0.9), not {text[:40]!r}"
        )
    return value


def _refuse(message: str) -> NoReturn:
    """Raise an error of one line, which argparse begins with the option's name."""
    line = " ".join(message.removeprefix("argument ").split())
    sys.stderr.write(f"{line}\n")
    sys.exit(2)


def _run(options: argparse.Namespace) -> int:
    from app.cli import plan_command

    return plan_command.run(options)
