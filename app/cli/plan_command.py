"""Output of `python -m app plan`: a table for people, or JSON."""

import argparse
import sys
from collections.abc import Iterable

import orjson

from app.provisioning.sizing.config_file import read_config
from app.provisioning.sizing.document import to_document
from app.provisioning.sizing.facts import GIB, ModelFacts, PlanError
from app.provisioning.sizing.fit import Engine, Plan, cache_shape, plan
from app.provisioning.sizing.gpus import GPUS, find_gpus
from app.provisioning.sizing.resources import Resources
from app.provisioning.sizing.weights import with_quantization

DEFAULT_MINUTES = 60
_HEADS = ["GPU", "GPUs", "weights", "overhead", "cache", "tokens", "requests", "verdict"]
_TEXTS = ("GPU", "verdict")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    engine = Engine(
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_gpus=options.max_gpus,
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
    """The line without characters that control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)


# --- For people ----------------------------------------------------------------------------------------


def _lines(facts: ModelFacts, plans: list[Plan], engine: Engine) -> Iterable[str]:
    first = plans[0]
    yield f"model     {_model(facts)}"
    yield f"cache     {_cache(facts, first, engine)}"
    yield f"request   {first.context:,} tokens, {first.concurrency:,} at the same time"
    for note in facts.notes:
        yield f"note      {note}"
    yield ""
    rows = [_HEADS, *(_row(one) for one in plans)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEADS))]
    for row in rows:
        yield "  ".join(_aligned(row, widths)).rstrip()
    yield ""
    yield "Weights, overhead and cache: GiB on each GPU. Tokens and requests: in the cache at a time."
    yield ""
    yield "Resources to request from Slurm, or the reason why it does not fit:"
    for one in plans:
        needed = _sbatch(one.resources) if one.resources else one.verdict
        yield f"{one.gpu.name.ljust(widths[0])}  {needed}"


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
        str(plan.gpus),
        f"{plan.weights / GIB:.1f}",
        f"{plan.overhead / GIB:.1f}",
        f"{plan.cache / GIB:.1f}" if fits else "-",
        f"{plan.tokens:,}" if fits else "-",
        f"{int(plan.requests):,}" if fits else "-",
        plan.verdict if plan.fits else "no",
    ]


def _aligned(row: list[str], widths: list[int]) -> Iterable[str]:
    for head, cell, width in zip(_HEADS, row, widths, strict=True):
        yield cell.ljust(width) if head in _TEXTS else cell.rjust(width)


def _sbatch(resources: Resources) -> str:
    hours, minutes = divmod(resources.minutes, 60)
    gres = f"--gres={resources.gres} " if resources.gres else ""
    return (
        f"{gres}-c {resources.cpu_cores} --mem={resources.memory_gb}G -t {hours:02}:{minutes:02}:00"
    )
