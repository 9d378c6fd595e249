"""A job over two nodes, its script run here: Slurm's and Ray's commands are stand-ins, Triton is `sleep`.

tests/integration/provisioning/test_launches_nodes.py runs it on two nodes of a real Slurm, with a real Triton.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.core.ids import new_id
from app.provisioning.job_script import ModelPlace, directory_of, pack_directory, render_script
from app.provisioning.profiles import read_profiles
from app.provisioning.spec import LaunchCreate, to_spec
from tests.conftest import ROOT

PROFILES = """
[profiles.pair]
provider = "slurm"
home = "HOME"
runtime = "plain"
command = ["sh", "-c", "exec sleep infinity", "serve"]
tiers = [{name = "gpu", gpus = 1, cpus = 2, memory_gb = 1}]
"""
COMMANDS = {
    # Runs the task, without Slurm's options, as on another node.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nSLURMD_NODENAME=second exec "$@"',
    "scontrol": "echo NodeName=one NodeAddr=127.0.0.1 x=y",
    # The script's pauses are for machines that start for minutes.
    "sleep": "case $1 in infinity) exec /bin/sleep infinity;; *) exec /bin/sleep 0.1;; esac",
}
SECONDS = 20.0


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    shutil.copy(ROOT / "tests" / "ray_stand_in.py", folder / "ray")
    for file in folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "first")
    return folder


@pytest.fixture
def start_minutes() -> float:
    """The time that Ray may take to start."""
    return 1.0


@pytest.fixture
def job(tmp_path: Path, start_minutes: float) -> Path:
    """The directory of a launch over two nodes."""
    file = tmp_path / "profiles.toml"
    file.write_text(PROFILES.replace("HOME", str(tmp_path / "home")))
    profiles = read_profiles(file)
    members = {"name": "one", "model": "org/model", "start_minutes": start_minutes}
    request = LaunchCreate.model_validate(members | {"resources": {"nodes": 2}})
    spec = to_spec(request, profiles, {})
    launch = new_id()
    directory = Path(directory_of(profiles["pair"], launch))
    directory.mkdir(parents=True)
    content = pack_directory(
        render_script(launch, spec, profiles["pair"]), spec, ModelPlace(), "unused"
    )
    subprocess.run(["tar", "--extract", f"--directory={directory}"], input=content, check=True)
    return directory


@pytest.fixture
def running(commands: Path, job: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job, whose server has started."""
    process = subprocess.Popen(["bash", job / "job.sh"], start_new_session=True)
    try:
        until(lambda: (job / "address").exists() or process.poll() is not None, job)
        yield process
    finally:
        process.terminate()
        process.wait(SECONDS)


def until(condition: Callable[[], bool], job: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, (job / "log").read_text()
        time.sleep(0.02)  # between two looks at another process


def parts_of(job: Path) -> list[psutil.Process]:
    """All processes of the job."""
    name = job.name.encode()
    return [one for one in psutil.process_iter() if name in _environment(one)]


def _environment(process: psutil.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:  # it has ended
        return b""


def ray_of(job: Path, node: bytes) -> psutil.Process:
    (found,) = (
        one
        for one in parts_of(job)
        if b"SLURMD_NODENAME=" + node in _environment(one) and "--num-gpus=1" in one.cmdline()
    )
    return found


@pytest.mark.parametrize("start_minutes", [0.02])
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        # A busy machine may need longer than this second for a part of it.
        (
            {"STAND_IN_GPUS": "2"},
            "Ray (has [0-3] of 2 GPUs after|did not start on first within) 1 seconds",
        ),
        ({"STAND_IN_VERSION": "2.9.3"}, r"needs Ray 2\.52 or newer: pip install 'ray>=2\.52'"),
        ({"STAND_IN_VERSION": ""}, r"needs Ray, which is missing: pip install 'ray>=2\.52'"),
    ],
)
def test_a_job_names_the_reason_before_triton_starts(
    commands: Path,
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    words: str,
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    with subprocess.Popen(["/bin/sleep", "infinity"]) as bystander:
        # Variables of the user's own, which a job's environment has.
        own = {"scratch": str(precious), "ray_scratch": str(precious), "parts": str(bystander.pid)}
        for name, value in {**own, **environment}.items():
            monkeypatch.setenv(name, value)
        if not environment.get("STAND_IN_VERSION", "2"):
            (commands / "ray").unlink()
        subprocess.run(["bash", job / "job.sh"], check=False, timeout=SECONDS)
        is_alive = bystander.poll() is None
        bystander.kill()
    assert is_alive
    assert precious.exists()
    assert re.search(words, (job / "log").read_text().splitlines()[-1])
    assert (job / "exit").read_text().startswith("1 ")
    assert not (job / "address").exists()
    assert parts_of(job) == []


@pytest.mark.parametrize("node", [b"first", b"second"])
def test_the_job_ends_when_ray_ends_on_a_node(
    running: subprocess.Popen[bytes], job: Path, node: bytes
) -> None:
    assert "Ray 2.60.0 has 2 GPUs on 2 nodes" in (job / "log").read_text()
    ray_of(job, node).send_signal(signal.SIGKILL)
    assert running.wait(SECONDS) == 1
    reason = (job / "log").read_text().splitlines()[-1]
    assert reason == "Ray ended on one of the nodes, and the server with it"
    assert parts_of(job) == []


def test_a_cancelled_job_leaves_no_process_and_no_folder(
    running: subprocess.Popen[bytes], job: Path
) -> None:
    rays = [ray_of(job, node) for node in (b"first", b"second")]
    words = [word for ray in rays for word in ray.cmdline() if word.startswith("--temp-dir=")]
    folders = {Path(word.partition("=")[2]) for word in words}
    assert len(folders) == 2
    assert all(folder.is_dir() for folder in folders)
    running.terminate()
    assert running.wait(SECONDS) == 143
    assert parts_of(job) == []
    assert not any(folder.exists() for folder in folders)
    assert (job / "exit").read_text().startswith("143 ")
