"""Modules of the vLLM backend, in a Python without Triton and vLLM."""

import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tests.conftest import ROOT


def load(name: str) -> Any:
    path = ROOT / "triton" / "backends" / "vllm" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"vllm_backend_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Absent(ModuleType):
    """A module that is not installed here: each of its names is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


def load_session() -> Any:
    """The module `session`, with those of its parts that import nothing of Triton or vLLM."""
    absent = (
        "triton_python_backend_utils", "engine_requests", "generation_request", "response_stream",
        "vllm", "vllm.outputs", "vllm.sampling_params", "vllm.v1", "vllm.v1.engine",
        "vllm.v1.engine.exceptions", "vllm.v1.engine.output_processor",
    )  # fmt: skip
    parts = {name: load(name) for name in ("grammar_watch", "session_messages", "session_slots")}
    with patch.dict(sys.modules, {name: _Absent(name) for name in absent} | parts):
        return load("session")
