"""`python -m app plan`: a table of GPUs on which a model fits, or JSON."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import orjson

from app.cli.arguments import whole_number
from app.provisioning.sizing.config_file import read_config
from app.provisioning.sizing.document import to_document
from app.provisioning.sizing.facts import GIB, ModelFacts, PlanError
from app.provisioning.sizing.fit import (
    DEFAULT_CONTEXT,
    MAX_BATCH,
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_GPUS,
    MAX_MINUTES,
    Engine,
    Plan,
    cache_shape,
    plan,
)
from app.provisioning.sizing.gpus import GPUS, find_gpus
from app.provisioning.sizing.quantization import BY_NAME
from app.provisioning.sizing.resources import MAX_NODES, Resources
from app.provisioning.sizing.weights import with_quantization

DEFAULT_MINUTES = 60
_HEADS = ["GPU", "nodes", "GPUs", "weights", "overhead", "cache", "tokens", "requests", "verdict"]
_TEXTS = ("GPU", "verdict")
_EPILOG = f"""examples:
  python -m app plan models/llama-3-8b
      the GPUs on which the model in this directory fits, and the resources to request
  python -m app plan config.json --gpu a100-80 --gpu l4 --context 8192 --concurrency 32
      whether 32 requests of 8192 tokens (prompt and output) can run at the same time
  python -m app plan config.json --quantization fp8 --json
  python -m app plan config.json --gpu a100-80 --max-gpus 4 --max-nodes 4
      also launches over several nodes, where the model is too large for four GPUs

It needs only config.json. If the directory has weights, their size is taken from their index or
headers. Sizes are per GPU, of the fullest node; `tokens` and `requests` are the cache's capacity at a time. The figures
are estimates: docs/plan.md has the formulas, their sources and their limits.

GPUs: {", ".join(GPUS)}

Exit status 2: the input was wrong; one line names the place. Otherwise 0, also if nothing fits."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    parser.epilog = _EPILOG
    parser.error = _refuse  # type: ignore[method-assign] # its own prints ten lines of usage first
    add = parser.add_argument
    add("model", type=Path, help="a config.json, the directory with it, or of a Triton model")
    text = "a kind of GPU, or several without their memory (a100); can be repeated (all of them)"
    add("--gpu", action="append", metavar="NAME", default=[], help=text)
    text = f"tokens of a request (the model's maximum, but at most {DEFAULT_CONTEXT})"
    add("--context", type=whole_number(1, MAX_CONTEXT), metavar="TOKENS", help=text)
    number = whole_number(1, MAX_CONCURRENCY)
    text = "requests that are to run at the same time (1)"
    add("--concurrency", type=number, metavar="N", default=1, help=text)
    number = whole_number(1, MAX_GPUS)
    add("--max-gpus", type=number, metavar="N", default=8, help="most GPUs of a node (8)")
    text = "most nodes of a server, which are taken where one is not enough (1)"
    add("--max-nodes", type=whole_number(1, MAX_NODES), metavar="N", default=1, help=text)
    add("--minutes", type=whole_number(1, MAX_MINUTES), metavar="N", help="serving time (60)")
    text = "type that the model runs in (its own)"
    add("--dtype", choices=("bfloat16", "float16", "float32"), help=text)
    text = "compression of weights, if config.json has none"
    add("--quantization", choices=tuple(BY_NAME), help=text)
    text = "type of the cache's elements (auto: the model's)"
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help=text)
    text = "share of each GPU's memory that vLLM may have (0.9)"
    add("--gpu-memory-utilization", type=_share, metavar="SHARE", default=0.9, help=text)
    number = whole_number(1, MAX_BATCH)
    text = "most tokens of a batch (2048, as inside Triton)"
    add("--max-num-batched-tokens", type=number, metavar="N", default=2048, help=text)
    add("--json", action="store_true", help="print JSON, sizes in bytes")


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
    engine = Engine(
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_gpus=options.max_gpus,
        max_nodes=options.max_nodes,
    )
    try:
        facts = with_quantization(read_config(options.model), options.quantization)
        gpus = [gpu for name in options.gpu or GPUS for gpu in find_gpus(name)]
        plans = plan(
            facts,
            dict.fromkeys(gpus),
            options.context,
            options.concurrency,
            engine,
            options.minutes or DEFAULT_MINUTES,
        )
    except PlanError as error:
        sys.stderr.write(f"{_printable(' '.join(str(error).split()))}\n")
        return 2
    if options.json:
        option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        sys.stdout.buffer.write(orjson.dumps(to_document(facts, plans), option=option))
    else:
        for line in _lines(facts, plans, engine):
            sys.stdout.write(f"{_printable(line)}\n")
    return 0


def _printable(line: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in line)


def _lines(facts: ModelFacts, plans: list[Plan], engine: Engine) -> Iterable[str]:
    first = plans[0]
    yield f"model     {_model(facts)}"
    yield f"cache     {_cache(facts, first, engine)}"
    yield f"request   {first.context:,} tokens, {first.concurrency:,} at the same time"
    for note in facts.notes:
        yield f"note      {note}"
    yield ""
    rows = [_HEADS, *(_row(one) for one in plans)]
    if engine.max_nodes == 1:
        rows = [
            [cell for head, cell in zip(_HEADS, row, strict=True) if head != "nodes"]
            for row in rows
        ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(_aligned(rows[0], row, widths)).rstrip()
    yield ""
    yield "Weights, overhead and cache: GiB on each GPU. Tokens and requests: in the cache at a time."
    yield ""
    yield "Resources to request from Slurm, or the reason why it does not fit:"
    for one in plans:
        needed = _sbatch(one.resources) if one.resources else one.verdict
        yield f"{one.gpu.name.ljust(widths[0])}  {needed}"
    if several := [
        (one.gpu.name, one.resources) for one in plans if one.resources and one.nodes > 1
    ]:
        yield ""
        yield "The same of `python -m app launch create`, by nodes that Ray joins:"
        for name, resources in several:
            yield f"{name.ljust(widths[0])}  {_launch(resources)}"


def _model(facts: ModelFacts) -> str:
    active = ""
    if facts.active_parameters < facts.parameters:
        active = f" ({_count(facts.active_parameters)} for a token)"
    quantized = f", {facts.quantization.method}" if facts.quantization else ""
    return (
        f"{facts.model_type}, {_count(facts.parameters)} parameters{active}, "
        f"{facts.layers} layers, {facts.dtype}{quantized}"
    )


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"


def _cache(facts: ModelFacts, first: Plan, engine: Engine) -> str:
    whole = cache_shape(facts, 1, first.dtype, engine).token_bytes
    windows = [
        f"{layers.count} of {facts.layers} layers keep {layers.window:,} tokens only"
        for layers in facts.cache
        if layers.window
    ]
    latent = ["each GPU holds all of it (MLA)"] if facts.is_latent else []
    return "; ".join([f"{whole / 1024:,.1f} KiB for a token", *latent, *windows])


def _row(plan: Plan) -> list[str]:
    fits = plan.cache > 0
    return [
        plan.gpu.name,
        str(plan.nodes),
        str(plan.gpus),
        f"{plan.weights / GIB:.1f}",
        f"{plan.overhead / GIB:.1f}",
        f"{plan.cache / GIB:.1f}" if fits else "-",
        f"{plan.tokens:,}" if fits else "-",
        f"{int(plan.requests):,}" if fits else "-",
        plan.verdict if plan.fits else "no",
    ]


def _aligned(heads: list[str], row: list[str], widths: list[int]) -> Iterable[str]:
    for head, cell, width in zip(heads, row, widths, strict=True):
        yield cell.ljust(width) if head in _TEXTS else cell.rjust(width)


def _sbatch(resources: Resources) -> str:
    hours, minutes = divmod(resources.minutes, 60)
    nodes = f"-N {resources.nodes} " if resources.nodes > 1 else ""
    gres = f"--gres={resources.gres} " if resources.gres else ""
    return (
        f"{nodes}{gres}-c {resources.cpu_cores} --mem={resources.memory_gb}G "
        f"-t {hours:02}:{minutes:02}:00"
    )


def _launch(resources: Resources) -> str:
    return (
        f"--nodes {resources.nodes} --gpus {resources.gpus} --cpus {resources.cpu_cores} "
        f"--memory-gb {resources.memory_gb} --minutes {resources.minutes}"
    )
