"""Launches on a real Slurm: from the request to a server that is registered, and to each end."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.inference.triton_client import TritonClient
from app.provisioning.profiles import read_profiles
from app.provisioning.spec import LaunchCreate, to_spec
from app.provisioning.store import LaunchStore
from tests import ssh_server
from tests.conftest import Service, make_settings, run_service
from tests.integration.launching import (
    EMBEDDED,
    SCRIPTED,
    Worker,
    launch,
    read_launch,
    stop,
    triton_of,
    until_state,
    with_profiles,
)
from tests.integration.support import finish, until
from tests.postgres import PostgresServer
from tests.slurm_cluster import NODE, SlurmCluster, is_installed, start_slurm

pytestmark = [pytest.mark.trial, pytest.mark.shard("slurm")]

_CLUSTER = """
provider = "slurm"
home = "HOME"
model_roots = ["/"]
partition = "main"
default_minutes = 5
max_minutes = 60
idle_minutes = 0
tiers = [{name = "cpu", cpus = 1, memory_gb = 1}, {name = "huge", gpus = 9}]
"""
PROFILES = f"""
[profiles.cluster]
{_CLUSTER.replace('model_roots = ["/"]', "")}
{EMBEDDED}
[profiles.broken]
{_CLUSTER.replace('model_roots = ["/"]', 'model_roots = ["ROOT"]')}
triton_entries = true
runtime = "plain"
command = ["sh", "-c", "echo the engine did not start >&2; exit 3"]
[profiles.silent]
{_CLUSTER.replace('model_roots = ["/"]', 'model_roots = ["ROOT"]')}
triton_entries = true
runtime = "plain"
command = ["sh", "-c", "sleep 300"]
""".replace("ROOT", str(Path(SCRIPTED).parent))


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
    """A service that launches on the cluster."""
    with_them = with_profiles(settings, tmp_path, PROFILES)
    async with run_service(with_them, with_worker=True) as service:
        yield service
        cluster.settle()


def assert_nothing_is_left(cluster: SlurmCluster, tmp_path: Path) -> None:
    assert cluster.jobs() == []
    assert list((tmp_path / "home" / "launches").iterdir()) == []


async def servers(service: Service) -> list[dict[str, object]]:
    return [dict(row) for row in await service.services.database.fetch("SELECT * FROM servers")]


async def test_a_node_that_fails(launching: Service, cluster: SlurmCluster, tmp_path: Path) -> None:
    accepted = await launch(launching, profile="silent")
    await until_state(launching, accepted["id"], "starting")
    cluster.run("scontrol", "update", f"nodename={NODE}", "state=down", "reason=broken fan")
    ended = await until_state(launching, accepted["id"], "failed")
    assert "NODE_FAIL" in ended["reason"]
    assert "broken fan" in ended["reason"]
    cluster.settle()
    assert_nothing_is_left(cluster, tmp_path)


@dataclass
class Limited:
    """A launch that runs into its time limit while the tests run."""

    settings: Settings
    launch: UUID


@pytest.fixture(scope="module")
def limited(
    cluster: SlurmCluster,
    postgres_server: PostgresServer,
    template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Limited]:
    """Slurm's time limits are whole minutes: it begins before the tests that take a minute."""
    folder = tmp_path_factory.mktemp("limited")
    name = "test_limited"
    asyncio.run(postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {template}"))
    settings = with_profiles(make_settings(postgres_server, name), folder, PROFILES)
    worker = Worker(settings, folder)

    async def begin() -> UUID:
        request = LaunchCreate(
            name="limited", model=SCRIPTED, profile="silent", time_limit_minutes=1
        )
        spec = to_spec(request, read_profiles(settings.profiles_file), {})
        async with Database(settings, "test") as database:
            launch = await LaunchStore(database).create("default", "slurm", spec)
        cluster.kept.add(f"llm-{launch.id}")
        await worker.start()
        return launch.id

    yield Limited(settings, asyncio.run(begin()))
    asyncio.run(worker.stop())
    asyncio.run(postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)"))


async def test_from_the_request_to_a_server_and_to_its_stop(
    limited: Limited, launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    accepted = await launch(launching)
    assert accepted["state"] == "submitted"
    healthy = await until_state(launching, accepted["id"], "healthy")
    assert [healthy["job_id"]] == cluster.jobs()
    assert healthy["node"] == NODE
    async with TritonClient(healthy["server"]["grpc"]) as client:
        assert await client.is_live()
    (server,) = await servers(launching)
    assert server["name"] == "one"
    assert {name: server[name] for name in healthy["server"]} == healthy["server"]

    async def is_logged() -> bool:  # what follows a launch reads its log again at each look
        log_answer = await launching.client.get(f"/launches/{accepted['id']}/log")
        return "Started GRPCInferenceService" in log_answer.json()["log"]

    await until(is_logged)
    ended = await stop(launching, accepted["id"])
    assert (ended["state"], ended["reason"]) == ("stopped", "stopped on request")
    assert_nothing_is_left(cluster, tmp_path)
    assert await servers(launching) == []
    assert (await launching.client.delete(f"/launches/{ended['id']}")).status_code == 204
    assert (await launching.client.get("/launches")).json() == []


async def test_an_idle_server_is_stopped_and_a_used_one_is_not(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    accepted = await launch(launching, idle_minutes=0.15)
    healthy = await until_state(launching, accepted["id"], "healthy")
    async with await triton_of(launching, accepted["id"]) as client:
        for _ in range(18):  # for longer than the idle time
            async for _ in client.generate("scripted", "hi {{chunks=20 delay_ms=30}}", {}):
                pass
            assert (await read_launch(launching, accepted["id"]))["state"] == "healthy"
    used = await read_launch(launching, accepted["id"])
    assert used["last_used_at"] > healthy["last_used_at"]
    ended = await until_state(launching, accepted["id"], "stopped")
    assert ended["reason"] == "idle for 0.15 minutes"
    assert_nothing_is_left(cluster, tmp_path)
    assert await servers(launching) == []


async def test_a_job_that_waits_tells_why_and_goes_on(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster.run("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=new fans")
    accepted = await launch(launching)

    async def tells_why() -> bool:
        found = await read_launch(launching, accepted["id"])
        return bool(found["state"] == "pending" and found["reason"].startswith("Slurm: "))

    await until(tells_why)
    (job,) = cluster.jobs()
    ended = await stop(launching, accepted["id"])
    assert (ended["state"], ended["job_id"], ended["started_at"]) == ("stopped", job, None)
    assert_nothing_is_left(cluster, tmp_path)


async def test_a_job_cancelled_from_outside(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    accepted = await launch(launching, profile="silent")
    started = await until_state(launching, accepted["id"], "starting")
    cluster.run("scancel", started["job_id"])
    ended = await until_state(launching, accepted["id"], "stopped")
    assert "cancelled outside of the service" in ended["reason"]
    assert "CANCELLED" in ended["reason"]
    assert_nothing_is_left(cluster, tmp_path)


async def test_a_script_that_fails_tells_its_last_words(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    accepted = await launch(launching, profile="broken")
    ended = await until_state(launching, accepted["id"], "failed")
    assert ended["exit_code"] == 3
    assert "FAILED" in ended["reason"]
    assert "the engine did not start" in ended["reason"]
    log_answer = await launching.client.get(f"/launches/{accepted['id']}/log")
    assert "the engine did not start" in log_answer.json()["log"]
    assert_nothing_is_left(cluster, tmp_path)


async def test_what_slurm_refuses(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    for members, words in (
        ({"partition": "nowhere"}, "Invalid partition"),
        ({"tier": "huge"}, "node configuration is not available"),
    ):
        accepted = await launch(launching, **members)
        ended = await until_state(launching, accepted["id"], "failed")
        assert "Slurm refused the job" in ended["reason"]
        assert words in ended["reason"]
        assert_nothing_is_left(cluster, tmp_path)


async def test_a_server_that_is_never_ready(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    accepted = await launch(launching, profile="silent", start_minutes=0.03)
    ended = await until_state(launching, accepted["id"], "failed")
    assert "not ready 0.03 minutes after the job's start" in ended["reason"]
    assert_nothing_is_left(cluster, tmp_path)


async def test_a_job_submitted_twice_runs_once(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """As by a worker that was frozen in its submission, and thawed after another's."""
    accepted = await launch(launching, profile="silent")
    found = await until_state(launching, accepted["id"], "starting")
    script = tmp_path / "home" / "launches" / accepted["id"] / "job.sh"
    kept = script.read_text()
    second = cluster.run("sbatch", "--parsable", str(script))

    async def is_alone() -> bool:
        return cluster.jobs() == [found["job_id"]]

    await until(is_alone)
    assert (await read_launch(launching, accepted["id"]))["state"] == "starting"
    assert second != found["job_id"]
    await stop(launching, accepted["id"])
    # And one that comes after the end finds no directory.
    late = tmp_path / "late.sh"
    late.write_text(kept)
    third = cluster.run("sbatch", "--parsable", str(late))

    async def has_ended() -> bool:
        return not cluster.jobs()

    await until(has_ended)
    assert "FAILED" in cluster.run(
        "squeue", "--noheader", "--states=all", f"--jobs={third}", "-o%T"
    )
    assert_nothing_is_left(cluster, tmp_path)


async def test_a_server_that_is_silent_for_a_while(
    launching: Service, cluster: SlurmCluster
) -> None:
    accepted = await launch(launching)
    await until_state(launching, accepted["id"], "healthy")
    async with await triton_of(launching, accepted["id"]) as c:
        await c.unload("scripted")
        found = await until_state(launching, accepted["id"], "unhealthy")
        assert found["reason"] == "the server does not answer"
        await c.load("scripted")
    found = await until_state(launching, accepted["id"], "healthy")
    assert found["reason"] == ""
    await stop(launching, accepted["id"])


async def test_a_result_runs_on_the_launched_server(
    launching: Service, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The service's own Triton has no such model: only the launched server can have answered."""
    model = tmp_path / "home" / "models" / "launched"
    shutil.copytree(SCRIPTED, model)
    accepted = await launch(launching, model=str(model))
    await until_state(launching, accepted["id"], "healthy")

    async def is_known() -> bool:
        answer = await launching.client.get("/models/launched")
        return answer.status_code == 200 and answer.json()["ready"] is True

    await until(is_known, 10)
    result = await finish(launching, "hi {{chunks=3}}", model="launched")
    assert (result["state"], result["model_name"]) == ("completed", "launched")
    assert result["result"]
    await stop(launching, accepted["id"])


# Holds a worker up in the moment between a submission and the record of it.
HOLD = """
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN PERFORM pg_sleep(60); RETURN NEW; END';
CREATE TRIGGER hold BEFORE UPDATE ON launches FOR EACH ROW
  WHEN (OLD.job_id IS NULL AND NEW.job_id IS NOT NULL) EXECUTE FUNCTION hold()
"""
RELEASE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE wait_event = 'PgSleep' AND datname = current_database()
"""


async def test_workers_killed_in_each_state_lose_nothing(
    cluster: SlurmCluster, settings: Settings, tmp_path: Path
) -> None:
    """No worker sees two states, and the job of the first is that of the last."""
    settings = with_profiles(settings, tmp_path, PROFILES, launch_lease_seconds=3.0)
    async with run_service(settings, with_worker=False) as service:
        database = service.services.database
        worker = Worker(settings, tmp_path)
        await database.run(lambda connection: connection.execute(HOLD))
        accepted = await launch(service)
        await worker.start()

        async def is_submitted() -> list[str]:
            return cluster.jobs()

        (job,) = await until(is_submitted)
        cluster.run("scontrol", "hold", job)
        await worker.kill()
        await database.fetch(RELEASE)
        await database.run(lambda connection: connection.execute("DROP TRIGGER hold ON launches"))
        assert (await read_launch(service, accepted["id"]))["state"] == "submitted"

        await worker.start()
        found = await until_state(service, accepted["id"], "pending", "starting", "healthy")
        assert found["job_id"] == job
        await worker.kill()
        cluster.run("scontrol", "release", job)
        for state in ("starting", "healthy"):
            await worker.start()
            await until_state(service, accepted["id"], state, "healthy")
            await worker.kill()
        await service.client.post(f"/launches/{accepted['id']}/stop")
        await worker.start()

        async def is_draining() -> object:
            return await database.fetchrow(
                "SELECT name FROM servers WHERE name = 'one' AND is_draining"
            )

        await until(is_draining)
        await worker.kill()
        await worker.start()
        ended = await until_state(service, accepted["id"], "stopped")
        assert (ended["job_id"], ended["reason"]) == (job, "stopped on request")

        await worker.stop()
        assert_nothing_is_left(cluster, tmp_path)
        assert await servers(service) == []
        assert (
            len(
                cluster.run(
                    "squeue", "--noheader", "--states=all", "--name=llm-" + accepted["id"]
                ).splitlines()
            )
            == 1
        )


async def test_a_cluster_behind_ssh(
    cluster: SlurmCluster, settings: Settings, tmp_path: Path
) -> None:
    """All commands and the server's ports go through ssh; workers and connections are lost."""
    if not ssh_server.is_installed():
        pytest.skip("needs openssh-server, and root")
    async with ssh_server.start_ssh(tmp_path, cluster.environment) as ssh:
        text = PROFILES.replace("[profiles.cluster]\n", f"[profiles.cluster]\n{ssh.profile}")
        settings = with_profiles(settings, tmp_path, text, launch_lease_seconds=3.0)
        async with run_service(settings, with_worker=False) as service:
            worker = Worker(settings, tmp_path)
            await worker.start()
            accepted = await launch(service)
            healthy = await until_state(service, accepted["id"], "healthy")
            address = healthy["server"]["grpc"]
            (server,) = await servers(service)
            assert server["grpc"] == address

            async def answers() -> bool:
                async with TritonClient(address) as client:
                    return await client.is_live()

            assert await answers()
            await worker.kill()

            async def is_closed() -> bool:
                return not await answers()

            await until(is_closed)  # the tunnel was the worker's alone
            await worker.start()
            await until(answers)

            await ssh.stop()

            async def tells_so() -> bool:
                found = await read_launch(service, accepted["id"])
                return "cannot be reached by ssh" in found["reason"]

            await until(tells_so)
            await ssh.start()
            await until(answers)
            ended = await stop(service, accepted["id"])
            assert (ended["state"], ended["reason"]) == ("stopped", "stopped on request")
            await worker.stop()
            assert await servers(service) == []
            assert_nothing_is_left(cluster, tmp_path)


@pytest.mark.timeout(150)
async def test_the_time_limit_of_a_slurm_job(limited: Limited, cluster: SlurmCluster) -> None:
    async with Database(limited.settings, "test") as database:
        store = LaunchStore(database)

        async def has_ended() -> bool:
            return (await store.get("default", limited.launch)).ended_at is not None

        await until(has_ended, 120)
        ended = await store.get("default", limited.launch)
    assert ended.state == "timeout"
    assert "TIMEOUT, its time limit was reached" in ended.reason
    cluster.kept.clear()
    assert cluster.jobs() == []
