"""The environment that triton/serve.sh makes for the server, by what the virtual environment holds."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

SERVE = ROOT / "triton" / "serve.sh"


def served(tmp_path: Path, *, cuda: bool = False, **variables: str) -> dict[str, str]:
    """The variables that a server started by serve.sh has."""
    work, venv = tmp_path / "work", tmp_path / "venv"
    (work / "lib").mkdir(parents=True)
    server = work / "tritonserver"
    server.write_text("#!/bin/sh\nexec env\n")
    server.chmod(0o755)
    libraries = venv / "lib" / "python3.11" / "site-packages" / "torch" / "lib"
    libraries.mkdir(parents=True)
    if cuda:
        (libraries / "libtorch_cuda.so").touch()
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    ended = subprocess.run(
        ["sh", SERVE, venv, work], env=keep | variables, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in ended.stdout.splitlines() if "=" in line)


def test_torch_leaves_the_cpu_alone_where_a_gpu_computes(tmp_path: Path) -> None:
    environment = served(tmp_path, cuda=True)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_torch_uses_the_cpu_where_nothing_else_computes(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    environment = served(tmp_path)
    assert environment["OMP_NUM_THREADS"] == str(cores - 1 if cores > 2 else 1)
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environment


@pytest.mark.parametrize("cuda", [True, False])
def test_the_operators_settings_win(cuda: bool, tmp_path: Path) -> None:
    environment = served(tmp_path, cuda=cuda, OMP_NUM_THREADS="3", VLLM_USE_FLASHINFER_SAMPLER="1")
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_only_the_drivers_directory_stays_in_the_library_path(tmp_path: Path) -> None:
    driver, toolkit = tmp_path / "with a driver", tmp_path / "toolkit"
    for directory in (driver, toolkit):
        directory.mkdir()
    (driver / "libcuda.so.1").touch()
    environment = served(tmp_path, LD_LIBRARY_PATH=f"{toolkit}::{driver}:")
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path}/work/lib:{driver}"
