"""Models that `up` serves: directories as in a Triton model repository, written if needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from app.cli.up import preflight
from app.cli.up.fetch import fetch
from app.cli.up.gpu import Gpu
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.core.program import ROOT, argument
from app.inference.model_repository import (
    ModelRepositoryError,
    ModelSource,
    check_quantization,
    parse_source,
    write_entry,
)

_DEMO = ROOT / "models" / "demo"
# The engine arguments of the demo model that suit a CPU only.
_CPU_ONLY = ("model", "dtype", "enforce_eager")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model to serve: `source` is a Hugging Face id or a directory, None for the demo model."""

    source: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None


async def prepare(
    options: ModelOptions, data: Path, progress: Progress, *, light: bool, gpus: Sequence[Gpu]
) -> Mapping[str, Path]:
    if options.source is None:
        if light:
            return {"scripted": ROOT / "triton" / "models" / "scripted"}
        return {"demo": _demo_for_gpu(data) if gpus else _DEMO}
    if light:
        raise StartError(
            f"{argument('MODEL')} needs vLLM, and {argument('LIGHT', 1)} leaves it out: give one of them."
        )
    try:
        check_quantization(options.quantization, on_cpu=not gpus)
        source = parse_source(options.source)
        weights = await obtain(source, data, progress)
        entry = data / "models" / source.name
        write_entry(
            entry, weights, quantization=options.quantization, max_model_len=options.max_model_len
        )
    except ModelRepositoryError as error:
        raise StartError(str(error)) from error
    preflight.check_weights(weights, gpus, options.quantization)
    return {source.name: entry}


async def obtain(source: ModelSource, data: Path, progress: Progress) -> Path:
    """The directory of a model's weights, after their download if needed. Raises StartError."""
    if source.directory is not None:
        return source.directory
    weights = data / "weights" / source.repository_id.replace("/", "--")
    async with progress.step(source.repository_id, done="is downloaded") as step:
        await fetch(source, weights, data / "logs" / "download.log", step.report)
    return weights


def _demo_for_gpu(data: Path) -> Path:
    arguments = orjson.loads((_DEMO / "1" / "model.json").read_bytes())
    engine = {name: value for name, value in arguments.items() if name not in _CPU_ONLY}
    entry = data / "models" / "demo"
    write_entry(entry, _DEMO / "1", engine=engine)
    return entry
