"""The images are built, and docker-compose.yml brings them up, in a real engine.

Only the base images are stand-ins, made of the operating system's packages (tests/docker_engine.py).
"""

import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import pytest

from app.cli.up import processes
from app.core import schema_version
from tests import ssh_server
from tests.conftest import ROOT
from tests.docker_engine import DockerEngine, is_installed, make_base_images, start_docker
from tests.integration.deployment.test_compose import SERVICES
from tests.integration.vast_stand_in import run_sshd

pytestmark = [
    pytest.mark.trial,  # images and containers
    pytest.mark.shard("containers"),
    # The first test waits for the base images (a minute of a free core) and the builds (a minute and a half).
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not is_installed(), reason="needs root, docker.io, docker-compose and debootstrap"
    ),
]

_START_SECONDS = 120.0
PROFILES = ("--profile", "mock", "--profile", "proxy")
STARTED = {"db", "migrate", "api", "ui", "worker", "triton-mock", "proxy"}
PORTS = {"api": "API_PORT", "page": "UI_PORT", "http": "PROXY_HTTP_PORT", "https": "PROXY_HTTPS_PORT", "proxied": "PROXY_API_PORT"}  # fmt: skip


@dataclass(frozen=True)
class Deployment:
    """The running containers of a copy of the repository; `ports` are those on 127.0.0.1."""

    engine: DockerEngine
    directory: Path
    ports: dict[str, int]

    def compose(self, *arguments: str, **settings: str) -> str:
        command = ("docker-compose", *PROFILES, *arguments)
        return self.engine.run(*command, cwd=self.directory, **settings)

    def up(self, **settings: str) -> None:
        """Start all, and wait until every container is healthy."""
        self.compose("up", "--detach", **settings)
        _until(lambda: set(self.health().values()) <= {"healthy", "exited"}, self.health)

    def health(self) -> dict[str, str]:
        """Return `healthy` and so on by service, or the state of a container without a check."""
        found = {}
        for container in self.compose("ps", "--quiet").split():
            (one,) = orjson.loads(self.engine.run("docker", "inspect", container))
            state = one["State"]
            service = one["Config"]["Labels"]["com.docker.compose.service"]
            found[service] = state.get("Health", {}).get("Status", state["Status"])
        return found

    def inspect(self, service: str, value: str) -> str:
        """A value of its container, by Docker's template."""
        container = self.compose("ps", "--quiet", "--all", service)
        return self.engine.run("docker", "inspect", f"--format={{{{{value}}}}}", container)

    def schema(self) -> str:
        """The revision of the database."""
        query = "SELECT version_num FROM alembic_version"
        return self.compose("exec", "-T", "db", "psql", "-U", "llm", "-Atc", query, "llm")

    def network(self, service: str, value: str) -> str:
        """`IPAddress` or `Gateway` in the network `default`."""
        name = f"{self.directory.name}_default"
        return self.inspect(service, f'(index .NetworkSettings.Networks "{name}").{value}')

    def client(self, *, is_proxied: bool = True) -> httpx.Client:
        """Return a client of the API, through nginx or past it."""
        if not is_proxied:
            return httpx.Client(base_url=f"http://127.0.0.1:{self.ports['api']}", timeout=60)
        trust = ssl.create_default_context(cafile=self.directory / "proxy/tls/certificate.pem")
        address = f"https://localhost:{self.ports['proxied']}"
        return httpx.Client(base_url=address, verify=trust, timeout=60)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with start_docker() as engine:
        make_base_images(
            engine,
            tmp_path_factory.mktemp("base"),
            python=_base_of(ROOT / "Dockerfile"),
            postgres=SERVICES["db"]["image"],
            nginx=SERVICES["proxy"]["image"],
        )
        directory = tmp_path_factory.mktemp("containers")
        deployment = Deployment(engine, directory, _copy_repository(directory))
        for service in ("api", "triton-mock"):
            _build(engine, directory, service)
        deployment.up()
        yield deployment
        deployment.compose("down", "--volumes")


def _base_of(dockerfile: Path) -> str:
    (base,) = {line.split()[1] for line in dockerfile.read_text().splitlines() if line.startswith("FROM")}  # fmt: skip
    return base


def _build(engine: DockerEngine, directory: Path, service: str) -> None:
    """Build as compose does, in the machine's network: the engine has no bridge of its own."""
    build = SERVICES[service]["build"]
    context, arguments = (
        (build, {}) if isinstance(build, str) else (build["context"], build["args"])
    )
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    tag = f"--tag={SERVICES[service]['image']}"
    engine.run("docker", "build", "--network=host", tag, *given, directory / context)


def _copy_repository(directory: Path) -> dict[str, int]:
    """Copy what a fresh clone has, with a certificate; returns the published ports, which are free ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.split("\0"):
        if (source := ROOT / name).is_file():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    _make_certificate(directory / "proxy" / "tls")
    ports = {name: processes.free_port() for name in PORTS}
    variables = [f"{PORTS[name]}={port}\n" for name, port in ports.items()]
    (directory / ".env").write_text("".join(variables))
    return ports


def _until(condition: Callable[[], bool], state: Callable[[], object]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.5)


def _make_certificate(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    key = directory / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-noenc", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", key, "-out", directory / "certificate.pem",
        ],
        capture_output=True, check=True,
    )  # fmt: skip
    key.chmod(0o644)


def _send(client: httpx.Client, content: str, *, wait: int = 0) -> dict[str, object]:
    headers = {"Prefer": f"wait={wait}"} if wait else {}
    body = {"model": "scripted", "content": content, "parameters": {"max_tokens": 16}}
    sent = client.post("/results/", json=body, headers=headers)
    assert sent.status_code in (200, 202), sent.text
    result: dict[str, object] = sent.json()
    return result


def _wait_for(client: httpx.Client, result_id: object) -> dict[str, object]:
    result: dict[str, object] = client.get(f"/results/{result_id}", params={"wait": 50}).json()
    return result


def test_every_container_is_healthy(deployment: Deployment) -> None:
    health = deployment.health()
    assert health.keys() == STARTED
    assert {name: found for name, found in health.items() if found != "healthy"} == {
        "migrate": "exited"
    }


def test_a_result_is_completed_through_nginx(deployment: Deployment) -> None:
    with deployment.client() as client, deployment.client(is_proxied=False) as beside:
        assert [model["name"] for model in client.get("/models/").json()] == ["scripted"]
        result = _send(client, "a prompt of the containers", wait=50)
        assert result["state"] == "completed", result
        assert result["result"]
        assert beside.get(f"/results/{result['id']}").json()["result"] == result["result"]


def test_the_page_is_behind_nginx(deployment: Deployment) -> None:
    address = f"https://localhost:{deployment.ports['https']}"
    trust = ssl.create_default_context(
        cafile=deployment.directory / "proxy" / "tls" / "certificate.pem"
    )
    page = httpx.get(address, verify=trust, follow_redirects=True, timeout=30)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    to_https = httpx.get(f"http://localhost:{deployment.ports['http']}/", timeout=30)
    assert to_https.status_code in (301, 308)


def test_a_killed_worker_is_restarted_and_loses_no_result(deployment: Deployment) -> None:
    with deployment.client() as client:
        result = _send(client, "slow {{chunks=20 delay_ms=200}}")
        path = f"/results/{result['id']}"
        _until(lambda: client.get(path).json()["attempt"] == 1, lambda: client.get(path).text)
        os.kill(int(deployment.inspect("worker", ".State.Pid")), signal.SIGKILL)
        end = _wait_for(client, result["id"])
        if end["state"] == "pending":
            end = _wait_for(client, result["id"])
        assert end["state"] == "completed", end


@pytest.mark.parametrize("service", ["db", "proxy", "api"])
def test_a_killed_container_starts_again_and_loses_no_result(
    deployment: Deployment, service: str
) -> None:
    with deployment.client() as client:
        results = [_send(client, f"{service} {one} {{{{chunks=20 delay_ms=200}}}}") for one in "ab"]
    os.kill(int(deployment.inspect(service, ".State.Pid")), signal.SIGKILL)
    _until(lambda: deployment.inspect(service, ".RestartCount") != "0", deployment.health)
    _until(lambda: deployment.health()[service] == "healthy", deployment.health)
    with deployment.client() as client:
        ends = [_wait_for(client, result["id"]) for result in results]
    assert {end["state"] for end in ends} == {"completed"}, ends


def test_a_dump_is_restored_by_the_documented_commands(deployment: Deployment) -> None:
    with deployment.client() as client:
        kept = _send(client, "dumped", wait=50)
        section = _section("backup.md", "With docker-compose")
        dump, _, _, restore, _ = re.findall(r"^docker-compose .*$", section, re.MULTILINE)
        assert "pg_dump" in dump
        assert "pg_restore" in restore
        _shell(deployment, dump)
        later = _send(client, "sent after the dump", wait=50)
    deployment.compose("stop", "api", "worker")
    (drop,) = re.findall(r"`(docker-compose exec \S+ db dropdb [^`]*)`", section)
    for command in (drop, drop.replace("dropdb", "createdb"), restore):
        _shell(deployment, command)
    deployment.up()
    with deployment.client() as client:
        assert client.get(f"/results/{kept['id']}").json()["result"] == kept["result"]
        assert client.get(f"/results/{later['id']}").status_code == 404


def test_the_schema_goes_back_and_up_again(deployment: Deployment) -> None:
    former, newest = schema_version.revisions()[-2:]
    section = _section("compose.md", "Upgrade")
    (back,) = re.findall(r"^docker-compose run .* (?=\$)", section, re.MULTILINE)
    deployment.compose("stop", "api", "worker")
    _shell(deployment, f"{back} {former}")
    assert deployment.schema() == former
    deployment.up()
    assert deployment.schema() == newest


def _section(page: str, title: str) -> str:
    return (ROOT / "docs" / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _shell(deployment: Deployment, command: str) -> None:
    """Run a documented command; the profiles, which a user has in .env, are in the environment."""
    profiles = ",".join(PROFILES[1::2])
    deployment.engine.run("sh", "-c", command, cwd=deployment.directory, COMPOSE_PROFILES=profiles)


@pytest.mark.skipif(not ssh_server.is_installed(), reason="needs openssh-server and -client")
def test_triton_is_at_the_end_of_an_ssh_tunnel(deployment: Deployment, tmp_path: Path) -> None:
    """At an address of this machine that containers reach: their network's gateway."""
    end = f"{deployment.network('worker', 'Gateway')}:{processes.free_port()}"
    files = ("docker-compose.yml", "docker-compose.tunnels.yml")
    tunnels = {"COMPOSE_FILE": ":".join(files), "TRITON_GRPC_SERVICE": end}
    with run_sshd(tmp_path) as port:
        ssh = subprocess.Popen(
            [
                "ssh", "-F", "none", "-N", "-p", str(port), "-i", tmp_path / "key",
                "-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={tmp_path / 'hosts'}",
                "-L", f"{end}:{deployment.network('triton-mock', 'IPAddress')}:8001", "127.0.0.1",
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deployment.up(**tunnels)
            with deployment.client(is_proxied=False) as client:
                (server,) = client.get("/servers").json()
                assert (server["grpc"], server["error"]) == (end, None)
                result = _send(client, "through the tunnel", wait=50)
                assert result["state"] == "completed", result
        finally:
            ssh.terminate()
            ssh.wait()
    deployment.up()


def test_results_survive_all_containers(deployment: Deployment) -> None:
    """`down` ends each process in its time, and the volume keeps the rows."""
    with deployment.client() as client:
        result = _send(client, "kept", wait=50)
    deployment.compose("stop")
    services = ("api", "worker", "ui", "proxy", "db", "triton-mock")
    codes = {service: deployment.inspect(service, ".State.ExitCode") for service in services}
    assert set(codes.values()) == {"0"}, codes
    deployment.compose("down")
    deployment.up()
    with deployment.client() as client:
        assert client.get(f"/results/{result['id']}").json()["result"] == result["result"]
