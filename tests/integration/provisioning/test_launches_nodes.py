"""Launches over two nodes of a real Slurm, with a real Triton; only Ray's commands are stand-ins."""

import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.core.settings import Settings
from app.inference.triton_client import TritonClient
from tests.conftest import ROOT, TRITON_VENV, Service, run_service
from tests.integration.launching import SCRIPTED, launch, stop, until_state, with_profiles
from tests.integration.support import until
from tests.slurm_cluster import PAIR, SlurmCluster, is_installed, start_slurm

pytestmark = [pytest.mark.trial, pytest.mark.shard("slurm")]

TRITON = ROOT / "triton"
_SERVE = (
    f"sh {TRITON}/layout.sh {TRITON_VENV} {TRITON}/backends . && "
    f'exec sh {TRITON}/serve.sh {TRITON_VENV} . "$@"'
)
PROFILES = f"""
[profiles.pair]
provider = "slurm"
home = "HOME"
model_roots = ["{Path(SCRIPTED).parent}"]
triton_entries = true
partition = "main"
default_minutes = 5
idle_minutes = 0
runtime = "plain"
command = ["sh", "-c", '''{_SERVE}''', "serve"]
listen = "{socket.gethostbyname(socket.gethostname())}"
tiers = [{{name = "gpu", gpus = 1, cpus = 2, memory_gb = 1}}]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if not is_installed():
        pytest.skip("needs munge and slurm-wlm, and root")
    with start_slurm(PAIR) as running:
        os.environ.update(running.environment)  # read by the commands that the service starts
        yield running
        for name in running.environment:
            del os.environ[name]


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of PATH that has the command `ray`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "ray_stand_in.py", folder / "ray")
    (folder / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
async def launching(
    cluster: SlurmCluster, ray: Path, settings: Settings, tmp_path: Path
) -> AsyncIterator[Service]:
    async with run_service(
        with_profiles(settings, tmp_path, PROFILES), with_worker=True
    ) as service:
        yield service
        cluster.settle()


def processes(name: bytes, launch_id: str) -> dict[int, dict[str, str]]:
    """Environments of a launch's processes whose command has this word, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if name in words and environment.get("LAUNCH_ID") == launch_id:
            found[int(folder.name)] = environment
    return found


async def until_ended(launch_id: str) -> None:
    async def has_ended() -> bool:
        return not processes(b"", launch_id)

    await until(has_ended, 40)


async def test_a_server_over_two_nodes(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    accepted = await launch(launching, resources={"nodes": 2})
    healthy = await until_state(launching, accepted["id"], "healthy", seconds=90)
    assert (healthy["spec"]["nodes"], healthy["node"]) == (2, PAIR[0])
    async with TritonClient(healthy["server"]["grpc"]) as client:
        assert await client.is_live()
    log = (await launching.client.get(f"/launches/{accepted['id']}/log")).json()["log"]
    assert "Ray 2.60.0 has 2 GPUs on 2 nodes" in log

    nodes = processes(b"--num-gpus=1", accepted["id"])
    assert {one["SLURMD_NODENAME"] for one in nodes.values()} == set(PAIR)
    (stub,) = processes(b"triton_python_backend_stub", accepted["id"]).values()
    head = next(one for one in nodes.values() if one["SLURMD_NODENAME"] == PAIR[0])
    assert stub["RAY_ADDRESS"].rpartition(":")[0] == stub["VLLM_HOST_IP"] == head["VLLM_HOST_IP"]
    assert stub["RAY_AUTH_MODE"] == "token"
    token = Path(stub["RAY_AUTH_TOKEN_PATH"])
    assert token.parent == tmp_path / "home" / "launches" / accepted["id"]
    assert token.stat().st_mode & 0o077 == 0

    ended = await stop(launching, accepted["id"])
    assert (ended["state"], ended["reason"]) == ("stopped", "stopped on request")
    assert cluster.jobs() == []
    await until_ended(accepted["id"])


@pytest.mark.parametrize("node", [0, 1])
async def test_the_job_ends_when_ray_ends_on_a_node(
    launching: Service, cluster: SlurmCluster, node: int
) -> None:
    accepted = await launch(launching, resources={"nodes": 2})
    await until_state(launching, accepted["id"], "healthy", seconds=90)
    for pid, environment in processes(b"--num-gpus=1", accepted["id"]).items():
        if environment["SLURMD_NODENAME"] == PAIR[node] and b"bash" not in command_of(pid):
            os.kill(pid, signal.SIGKILL)
    ended = await until_state(launching, accepted["id"], "failed", seconds=60)
    assert "Ray ended on one of the nodes, and the server with it" in ended["reason"]
    assert ended["exit_code"] == 1
    assert cluster.jobs() == []
    await until_ended(accepted["id"])


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
