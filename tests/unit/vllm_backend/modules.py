"""Modules of the vLLM backend that import nothing of Triton or vLLM."""

import importlib.util
from typing import Any

from tests.conftest import ROOT


def load(name: str) -> Any:
    path = ROOT / "triton" / "backends" / "vllm" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"vllm_backend_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
