"""Entries of scripted pooling models; see tests/triton_models/pooling."""

import shutil
from pathlib import Path

_SCRIPTED = Path(__file__).parent / "triton_models" / "pooling"
_CANCELLATIONS = Path(__file__).parents[1] / "triton" / "backends" / "vllm" / "cancellations.py"


def pooling_entries(directory: Path) -> dict[str, Path]:
    """A repository in `directory` with `pooling`, an embeddings model, and `ranking`, a cross encoder."""
    entries = {name: directory / name for name in ("pooling", "ranking")}
    for entry in entries.values():
        shutil.copytree(_SCRIPTED, entry)
        shutil.copy(_CANCELLATIONS, entry / "1")
    classifier = '{"model": "ranking", "runner": "pooling", "convert": "classify"}'
    (entries["ranking"] / "1" / "model.json").write_text(classifier)
    return entries
