"""Launches on a real Slurm: from the request to a server that is registered, and to each end."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.settings import Settings
from app.triton_client import TritonClient
from tests.conftest import Service, run_service
from tests.integration.launching import (
    EMBEDDED,
    launch,
    stop,
    until_state,
    with_profiles,
)
from tests.slurm_cluster import SlurmCluster, is_installed, start_slurm

pytestmark = pytest.mark.system

PROFILES = f"""
[profiles.cluster]
provider = "slurm"
home = "HOME"
partition = "main"
default_minutes = 5
max_minutes = 60
idle_minutes = 0
{EMBEDDED}
[[profiles.cluster.tiers]]
name = "cpu"
cpus = 1
memory_gb = 1
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if not is_installed():
        pytest.skip("needs munge and slurm-wlm, and root")
    with start_slurm() as running:
        os.environ.update(running.environment)  # read by the commands that the service starts
        yield running
        for name in running.environment:
            del os.environ[name]


@pytest.fixture
async def launching(
    cluster: SlurmCluster, settings: Settings, tmp_path: Path
) -> AsyncIterator[Service]:
    """A service that launches on the cluster, and a cluster without a job."""
    async with run_service(
        with_profiles(settings, tmp_path, PROFILES), with_worker=True
    ) as service:
        yield service
        cluster.settle()


async def test_from_the_request_to_a_server_and_to_its_stop(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    accepted = await launch(launching)
    assert accepted["state"] == "submitted"
    healthy = await until_state(launching, accepted["id"], "healthy")
    assert [healthy["job_id"]] == cluster.jobs()
    async with TritonClient(healthy["server"]["grpc"]) as client:
        assert await client.is_live()
    (server,) = [
        dict(row) for row in await launching.services.database.fetch("SELECT * FROM servers")
    ]
    assert server["name"] == "one"
    assert {name: server[name] for name in healthy["server"]} == healthy["server"]
    ended = await stop(launching, accepted["id"])
    assert (ended["state"], ended["reason"]) == ("stopped", "stopped on request")
    assert cluster.jobs() == []
    assert list((tmp_path / "home" / "launches").iterdir()) == []
    assert not await launching.services.database.fetch("SELECT * FROM servers")
