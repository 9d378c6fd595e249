"""The engine's options in the repository are those of the vLLM beside it."""

import subprocess
from pathlib import Path

import pytest

from app.inference import engine_options
from tests.conftest import ROOT, TRITON_VENV

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_the_options_are_vllms(tmp_path: Path) -> None:
    made = tmp_path / "options.json"
    tool = ROOT / "tools" / "engine_options.py"
    subprocess.run([TRITON_VENV / "bin" / "python", "-I", tool, made], check=True)
    assert made.read_text() == engine_options._FILE.read_text(), f"{tool} writes other options now"
