"""GPU=0|1 as make sees it, on a machine whose driver does not load."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.cli.up import gpu, preflight
from app.cli.up.gpu import Gpu, GpuError
from app.cli.up.processes import StartError
from tests.conftest import ROOT, TRITON_VENV

SCRIPT = ROOT / "app" / "cli" / "up" / "gpu.py"
NO_DRIVER = "libcuda-of-no-machine.so.1"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_without_a_driver_the_cpu_is_chosen_without_a_word() -> None:
    answer = ask("", "--library", NO_DRIVER)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "cpu\n", "")


def test_without_a_driver_a_demanded_gpu_is_refused_in_one_line() -> None:
    answer = ask("1", "--library", NO_DRIVER)
    assert answer.returncode == 1
    assert answer.stdout.count("\n") == 1
    assert f"no NVIDIA driver ({NO_DRIVER} cannot be loaded): install driver 580" in answer.stdout


def test_a_driver_that_ends_its_process_is_refused_in_one_line() -> None:
    """libc loads, and has no function of CUDA."""
    answer = ask("1", "--library", "libc.so.6")
    assert answer.returncode == 1
    assert "libc.so.6 ended its process with status 1" in answer.stdout
    assert ask("", "--library", "libc.so.6").stderr.startswith("Running on the CPU: libc.so.6")


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "stands.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "stands.py"))
    monkeypatch.setattr(gpu, "PROBE_SECONDS", 0.2)
    with pytest.raises(GpuError, match="does not answer within 0 s"):
        gpu.find()


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # of a make that runs the tests
        environment.pop(name, None)
    return subprocess.run(
        ["make", "--dry-run", "run", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_make_ends_before_the_install_in_one_line() -> None:
    begun = time.monotonic()
    ended = make("GPU=1")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    # If there is no driver, the first; with one, no device is visible.
    assert "libcuda.so.1 cannot be loaded" in ended.stderr or "shows no GPU" in ended.stderr
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["GPU=maybe"], "GPU=maybe is neither 0 nor 1"),
        (["GPU=1", "LIGHT=1"], "give LIGHT=1 or GPU=1"),
    ],
)
def test_make_refuses_what_does_not_fit(arguments: list[str], words: str) -> None:
    ended = make(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert words in ended.stderr


@pytest.mark.parametrize("arguments", [[], ["GPU=0"]])
def test_make_runs_on_the_cpu_elsewhere(arguments: list[str]) -> None:
    planned = make(*arguments)
    assert planned.returncode == 0, planned.stderr
    assert "--gpu" not in planned.stdout
    assert ".venv-triton-gpu" not in planned.stdout


def test_make_installs_and_starts_vllm_for_the_gpu_that_is_there(tmp_path: Path) -> None:
    """The answer of the script is given: this machine may have no GPU."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho gpu\n")
    python.chmod(0o755)
    planned = make(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert planned.returncode == 0, planned.stderr
    assert "-m app up" in planned.stdout
    assert " --gpu " in planned.stdout
    if not (ROOT / ".venv-triton-gpu" / ".gpu").exists():
        assert "install.py gpu .venv-triton-gpu" in planned.stdout
    assert "install.py cpu" not in planned.stdout


def test_a_gpu_needs_a_compiler_and_pythons_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "find", lambda: [Gpu("T4", 16 << 30, (7, 5))])
    monkeypatch.setenv("CC", "sh")  # any program
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text("#!/bin/sh\necho /nowhere/include/python3.11\n")
    python.chmod(0o755)
    with pytest.raises(StartError, match=r"/python3\.11/Python\.h.*install python3\.11-dev"):
        preflight.find_gpus(venv)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(StartError, match=r"no C compiler.*install gcc"):
        preflight.find_gpus(TRITON_VENV)


def test_weights_are_held_against_the_gpus_memory(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 << 30)  # takes no room on the disk
    small = [Gpu("GTX 1080", 8 << 30, (7, 5))]
    with pytest.raises(StartError, match=r"does not fit GTX 1080: 10240 MiB of weights, 7372 MiB"):
        preflight.check_weights(tmp_path, small)
    preflight.check_weights(tmp_path, small, "fp8")
    preflight.check_weights(tmp_path, [Gpu("T4", 16 << 30, (7, 5))])
