"""`python -m app plan`: its arguments, and help that teaches. `plan_command` runs it."""

import argparse
from pathlib import Path

from app.plan.fit import DEFAULT_CONTEXT
from app.plan.gpus import GPUS
from app.plan.quantization import BY_NAME

_EPILOG = f"""examples:
  python -m app plan models/llama-3-8b
      on which GPUs the model in this directory fits, and what to ask a scheduler for
  python -m app plan config.json --gpu a100-80 --gpu l4 --context 8192 --concurrency 32
      whether 32 requests of 8192 tokens (prompt and output) can run at the same time
  python -m app plan config.json --quantization fp8 --json

It reads config.json alone; no weights are needed. Where they are in the directory, their size is
taken from their index or headers. Sizes are of each GPU; `tokens` and `requests` are what the cache
holds at a time. They are estimates: docs/plan.md has the formulas, their sources and their limits.

GPUs: {", ".join(GPUS)}

Exit status 2: the input was wrong; one line says what and where. Otherwise 0, also if nothing fits."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line."""
    text = "Tell on which GPUs a model fits, from its config.json."
    parser = commands.add_parser(
        "plan",
        help=text,
        description=text,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("model", type=Path, help="a config.json, or the directory with it")
    _add_request(parser)
    _add_engine(parser)
    parser.add_argument(
        "--tiers", type=Path, metavar="FILE",
        help="also choose a tier of this TOML file (app/plan/tiers.py shows one)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", action="append", metavar="NAME", default=[],
        help="a kind of GPU, also its beginning (t4); can be repeated (all of them)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=int, metavar="TOKENS",
        help=f"tokens of a request (what the model can, but at most {DEFAULT_CONTEXT})",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, metavar="N", default=1,
        help="requests that are to run at the same time (1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-gpus", type=int, metavar="N", default=8, help="most GPUs of a node (8)"
    )
    parser.add_argument(
        "--minutes", type=int, metavar="N", default=60, help="how long it is to serve (60)"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"),
        help="type that the model runs in (its own)",
    )  # fmt: skip
    parser.add_argument(
        "--quantization", choices=tuple(BY_NAME),
        help="how weights are to be compressed, where config.json does not say they are",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto",
        help="type of the cache's elements (auto: the model's)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", default=0.9,
        help="share of each GPU's memory that vLLM may have (0.9)",
    )  # fmt: skip
    parser.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", default=2048,
        help="most tokens of a batch (2048, as inside Triton)",
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    from app import plan_command

    return plan_command.run(options)
