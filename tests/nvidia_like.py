"""Servers with models that behave as NVIDIA's vLLM backend does; see tests/triton_models/nvidia_like."""

import shutil
from pathlib import Path

from tests.conftest import ROOT

_LIKE_NVIDIA = Path(__file__).parent / "triton_models" / "nvidia_like"
_SCRIPTED = ROOT / "triton" / "models" / "scripted"


def nvidia_like(directory: Path, name: str = "nvidia", **parameters: str) -> dict[str, Path]:
    """A repository entry of that name with `parameters` in its config.pbtxt."""
    entry = directory / name
    (entry / "1").mkdir(parents=True)
    config = (_LIKE_NVIDIA / "config.pbtxt").read_text()
    for key, value in parameters.items():
        config += f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
    (entry / "config.pbtxt").write_text(config)
    shutil.copy(_LIKE_NVIDIA / "1" / "model.py", entry / "1")
    for file in (_SCRIPTED / "1").glob("*.py"):
        shutil.copy(file, entry / "1" / ("scripted.py" if file.name == "model.py" else file.name))
    return {name: entry}
