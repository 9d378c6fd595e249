"""The quantizations that the service lists are those of the vLLM beside it."""

import os
import subprocess
from pathlib import Path

import pytest

from app.inference.model_repository import NOT_ON_CPU, QUANTIZATIONS
from tests.conftest import TRITON_VENV

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
# Compresses any model while it loads, on any processor: shows that the others fail for a reason.
ON_LOAD = "int8_per_channel_weight_only"


def test_the_lists_are_vllms(entries: dict[str, Path]) -> None:
    tried = subprocess.run(
        [
            TRITON_VENV / "bin" / "python",
            "-I",
            Path(__file__).with_name("try_quantizations.py"),
            entries["qwen"] / "1" / "weights",
            *NOT_ON_CPU,
            ON_LOAD,
        ],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    words = [line.split() for line in tried.stdout.splitlines()]
    known = next(line[1:] for line in words if line[:1] == ["known"])
    assert sorted(known) == list(QUANTIZATIONS)
    answers = {line[0]: line[1] for line in words if line[1:] in (["yes"], ["no"])}
    assert answers == {**dict.fromkeys(NOT_ON_CPU, "no"), ON_LOAD: "yes"}, tried.stderr
