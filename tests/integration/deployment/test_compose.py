"""docker-compose.yml: valid, closed to the outside, without root, pinned, and in step with Settings."""

import asyncio
import ipaddress
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import app.cli.main as cli
from app.core.settings import Settings
from app.ui.settings import UiSettings
from nvidia_triton.__main__ import settings_line
from nvidia_triton.definition import read
from tests.attribution_workers import environment_of
from tests.conftest import ROOT, run_service
from tests.integration.support import until

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# A version with at least two numbers ("18.4-bookworm", "26.09-vllm-python-py3"), or a digest.
PINNED = re.compile(r"^\S+(:\d+\.\d+\S*|@sha256:[0-9a-f]{64})$")
EVERY_PROFILE = [
    part for name in ("cpu", "gpu", "mock", "proxy", "attribution") for part in ("--profile", name)
]


def environment(name: str) -> dict[str, str]:
    """The variables of an env file."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolate(text: str) -> str:
    """The values that compose reads if no variable is set: `${NAME:-default}` is the default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def context_of(service: dict[str, Any]) -> str:
    """The directory that a service's image is built from."""
    build = service["build"]
    context: str = build["context"] if isinstance(build, dict) else build
    return context


def dockerfiles() -> list[Path]:
    """The Dockerfiles that the services are built from."""
    contexts = {context_of(service) for service in SERVICES.values() if "build" in service}
    return [ROOT / context / "Dockerfile" for context in contexts]


def compose_command() -> list[str] | None:
    """Docker's compose command, in either version; None where there is none."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if found.returncode == 0:
            return ["docker", "compose"]
    return None


@pytest.mark.trial
def test_compose_accepts_the_file() -> None:
    command = compose_command()
    if command is None:
        pytest.skip("needs docker-compose")
    with_tunnels = ["-f", "docker-compose.yml", "-f", "docker-compose.tunnels.yml"]
    for profiles in ([], EVERY_PROFILE, with_tunnels):
        checked = subprocess.run(
            [*command, *profiles, "config", "--quiet"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr


def test_only_api_page_and_proxy_are_published_and_on_loopback_only() -> None:
    published = {
        name: [interpolate(port) for port in service["ports"]]
        for name, service in SERVICES.items()
        if "ports" in service
    }
    port = environment(".env.api.dev")["LLM_PORT"]
    page = UiSettings.model_fields["port"].default
    assert published == {
        "api": [f"127.0.0.1:{port}:{port}"],
        "ui": [f"127.0.0.1:{page}:{page}"],
        "proxy": ["127.0.0.1:80:8080", "127.0.0.1:443:8443", "127.0.0.1:9443:9443"],
    }
    assert not any("network_mode" in service for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # NVIDIA's image alone may need to write to its own files.
    assert service["read_only"] is (name != "triton-gpu")
    assert not service.get("privileged")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_does_not_run_as_root(name: str) -> None:
    service = SERVICES[name]
    user = str(service.get("user", ""))
    if not user:
        instructions = (ROOT / context_of(service) / "Dockerfile").read_text()
        user = re.findall(r"^USER\s+(\S+)", instructions, re.MULTILINE)[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_restarts_and_bounds_its_log(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == ("no" if name == "migrate" else "unless-stopped")
    assert service["logging"]["options"]["max-size"]
    assert ("healthcheck" in service) is (name != "migrate")


def test_the_apis_check_does_not_depend_on_the_engines() -> None:
    """`/health`, `/ping` and `/` do, with LLM_HEALTH=engine."""
    check = SERVICES["api"]["healthcheck"]["test"][-1]
    assert re.findall(r"http://[^/]+(/[^\"]*)", check) == ["/health/ready"]


def test_the_attribution_worker_reads_the_indexes_of_the_api(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both mount them read-only; the worker opens them by default, and the API by a variable."""
    worker, api = SERVICES["attribution"], SERVICES["api"]
    for service in (worker, api):
        (mount,) = [one for one in service["volumes"] if "/indexes" in one]
        assert interpolate(mount) == "indexes:/indexes:ro"
    assert "indexes" in COMPOSE["volumes"]
    assert worker["healthcheck"] == SERVICES["worker"]["healthcheck"]
    assert worker["pids_limit"] >= 300
    for service, expected in ((worker, Path("/indexes/indexes.toml")), (api, None)):
        variables = environment(".env.api.dev") | service["environment"]
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, interpolate(value))
            assert Settings().indexes_file == expected
    command = [interpolate(one) for one in worker["command"]]
    run = cli._parser(command).parse_args(command)
    assert (run.kind, run.index, run.engines) == ("attribution", "demo", 1)


@pytest.mark.trial
async def test_a_worker_is_healthy_while_it_renews_its_lease(settings: Settings) -> None:
    command = [part.replace("$$", "$") for part in SERVICES["worker"]["healthcheck"]["test"]]
    assert command[:2] == ["CMD", "python"]

    async def is_healthy() -> bool:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command[2:], env=environment_of(settings), stderr=subprocess.PIPE
        )
        _, errors = await process.communicate()
        assert errors == b""
        return process.returncode == 0

    assert not await is_healthy()
    async with run_service(settings, with_worker=True) as service:
        await until(lambda: service.services.database.fetch("SELECT FROM workers"))
        assert await is_healthy()
    assert not await is_healthy()


def test_images_are_pinned() -> None:
    images = [service["image"] for service in SERVICES.values() if "build" not in service]
    stages: set[str] = set()
    for dockerfile in dockerfiles():
        for line in re.findall(r"^FROM\s+(.+)$", dockerfile.read_text(), re.MULTILINE):
            image, *alias = line.split()
            if image not in stages:
                images.append(image)
            stages.update(alias[1:])
    assert len(images) >= 3
    assert [image for image in images if not PINNED.match(image)] == []


def test_the_environment_is_one_of_known_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = environment(".env.api.dev")
    aliases = {field.alias for field in Settings.model_fields.values()}
    assert given.keys() <= aliases
    required = {field.alias for field in Settings.model_fields.values() if field.is_required()}
    assert given.keys() >= required
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.database_addresses() == [("db", 5432)]
    # If authentication is off on an address other than loopback, a setting must confirm it.
    assert settings.host == "0.0.0.0"  # noqa: S104
    assert settings.allow_unauthenticated


def test_the_pages_container_is_given_the_api_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES["ui"]
    assert "env_file" not in service  # it holds the database's password
    aliases = {field.alias for field in UiSettings.model_fields.values()}
    assert service["environment"].keys() <= aliases
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, interpolate(value))
    page, given = UiSettings(), environment(".env.api.dev")
    assert page.api_url.host == "api"
    assert page.api_url.host in given["LLM_ALLOWED_HOSTS"].split(",")
    assert str(page.api_url.port) == given["LLM_PORT"]
    assert page.shown_api_url == f"http://127.0.0.1:{given['LLM_PORT']}"


def test_the_proxy_and_the_page_alone_may_say_for_whom_they_speak() -> None:
    address = {
        name: service["networks"]["front"]["ipv4_address"]
        for name, service in SERVICES.items()
        if "front" in service.get("networks", {})
    }
    assert address.keys() == {"api", "ui", "proxy"}
    subnet = ipaddress.ip_network(COMPOSE["networks"]["front"]["ipam"]["config"][0]["subnet"])
    assert all(ipaddress.ip_address(one) in subnet for one in address.values())
    trusted = {
        name: set(SERVICES[name]["environment"]["LLM_TRUSTED_PROXIES"].split(","))
        for name in ("api", "ui")
    }
    assert trusted == {"api": {address["proxy"], address["ui"]}, "ui": {address["proxy"]}}


def test_the_environment_may_name_more_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(".env.api.dev").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LLM_ALLOWED_HOSTS", "localhost, api,[::1]")
    assert Settings().allowed_hosts == ["localhost", "api", "[::1]"]


def test_both_environments_name_the_same_database() -> None:
    api, database = environment(".env.api.dev"), environment(".env.db.dev")
    assert database == {
        "POSTGRES_USER": api["LLM_DATABASE_ADMIN_USER"],
        "POSTGRES_PASSWORD": api["LLM_DATABASE_PASSWORD"],
        "POSTGRES_DB": api["LLM_DATABASE_DB"],
    }


def test_the_documented_first_start_makes_settings_of_its_own(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "compose.md").read_text()
    block = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[0]
    commands = [line for line in block.splitlines() if not line.startswith("git clone ")]
    for name in (".env.api.dev", ".env.db.dev"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(["bash", "-ec", "\n".join(commands)], cwd=tmp_path, check=True)
    own, api, database = (environment(str(tmp_path / name)) for name in (".env", ".env.api", ".env.db"))  # fmt: skip
    assert interpolate(SERVICES["api"]["env_file"]) == ".env.api.dev"
    assert interpolate(SERVICES["db"]["env_file"]) == ".env.db.dev"
    assert (own["API_ENV_FILE"], own["DB_ENV_FILE"]) == (".env.api", ".env.db")
    assert api["LLM_DATABASE_PASSWORD"] == database["POSTGRES_PASSWORD"]
    assert len({own["LLM_TRITON_SECRET"], own["LLM_UI_SECRET"], database["POSTGRES_PASSWORD"]}) == 3
    assert min(map(len, (own["LLM_TRITON_SECRET"], database["POSTGRES_PASSWORD"]))) >= 32
    changed = {"LLM_DATABASE_PASSWORD", "LLM_AUTH"}
    given = environment(".env.api.dev")
    for name in ("LLM_ALLOW_UNAUTHENTICATED", "LLM_ALLOWED_HOSTS", "LLM_DATABASE_PASSWORD"):
        del given[name]
    assert {name: api[name] for name in api.keys() - changed} == given
    assert api["LLM_AUTH"] == "on"
    assert {(tmp_path / name).stat().st_mode & 0o077 for name in (".env", ".env.api", ".env.db")} == {0}  # fmt: skip


def test_a_documented_variable_is_one_of_the_file() -> None:
    page = (ROOT / "docs" / "compose.md").read_text().partition("| variable of")[2]
    cells = re.findall(r"^\| (`[^|]*) \|", page.partition("\n\n")[0], re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    used = set(re.findall(r"\$\{(\w+):-", (ROOT / "docker-compose.yml").read_text()))
    assert documented == used - {"MOCK_MODEL"} | {"COMPOSE_PROFILES"}


def test_memory_of_a_user_is_owned_by_it() -> None:
    """Such a directory of the image may be root's; its mode replaces ours when a container starts again."""
    for name, service in SERVICES.items():
        for mount in service.get("tmpfs", []):
            path, _, options = mount.partition(":")
            if path != "/tmp":  # noqa: S108 - writable for all users in each image
                user, group = service["user"].split(":")
                assert {f"uid={user}", f"gid={group}"} <= set(options.split(",")), (name, path)


def test_triton_is_reached_by_the_name_that_its_services_take() -> None:
    given = environment(".env.api.dev")
    hosts = {given[f"TRITON_{kind}_SERVICE"].split(":")[0] for kind in ("GRPC", "METRICS")}
    for name in ("triton-cpu", "triton-gpu", "triton-mock"):
        assert set(SERVICES[name]["networks"]["default"]["aliases"]) == hosts


def test_api_and_worker_may_have_triton_at_the_ends_of_tunnels() -> None:
    tunnels = yaml.safe_load((ROOT / "docker-compose.tunnels.yml").read_text())["services"]
    assert tunnels.keys() == {"api", "worker"}
    definition = read(
        ROOT / "nvidia_triton/vastai_instance_definition.yaml", {"tunnels_address": "172.17.0.1"}
    )
    printed = dict(word.split("=", 1) for word in settings_line(definition).split())
    del printed[
        "LLM_MODEL_REPOSITORY"
    ]  # a directory of the machine, which the containers have at /models
    for service in tunnels.values():
        given = {name: interpolate(value) for name, value in service["environment"].items()}
        assert given == printed


def test_triton_and_its_clients_have_one_secret_and_http_is_closed() -> None:
    names = ("api", "worker", "triton-cpu", "triton-gpu", "triton-mock")
    secrets = {interpolate(SERVICES[name]["environment"]["LLM_TRITON_SECRET"]) for name in names}
    assert len(secrets) == 1
    assert "LLM_TRITON_SECRET" not in SERVICES["ui"]["environment"]
    assert "--http-address=127.0.0.1" in SERVICES["triton-gpu"]["command"]
    assert "--http-address=127.0.0.1" in (ROOT / "triton" / "entrypoint.sh").read_text()


def test_tritons_container_needs_a_secret() -> None:
    ended = subprocess.run(
        ["sh", ROOT / "triton" / "entrypoint.sh"],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("LLM_TRITON_SECRET is missing")


def test_a_worker_has_time_for_its_grace() -> None:
    seconds = int(SERVICES["worker"]["stop_grace_period"].removesuffix("s"))
    assert seconds > Settings.model_fields["shutdown_grace_seconds"].default + 5


def test_prometheus_reaches_each_process_inside_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = environment(".env.api.dev")
    worker = SERVICES["worker"]
    for name, value in (given | worker["environment"]).items():
        monkeypatch.setenv(name, interpolate(value))
    settings = Settings()
    assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", 9464)  # noqa: S104
    assert "ports" not in worker
    example = yaml.safe_load((ROOT / "monitoring" / "prometheus.yaml").read_text())
    jobs = {job.pop("job_name"): job for job in example["scrape_configs"]}
    assert jobs == {
        "llm-api": {"static_configs": [{"targets": [f"api:{settings.port}"]}]},
        "llm-worker": {
            "dns_sd_configs": [{"names": ["worker"], "type": "A", "port": settings.metrics_port}]
        },
        "triton": {"static_configs": [{"targets": [given["TRITON_METRICS_SERVICE"]]}]},
    }
    assert {"api", "worker"} <= SERVICES.keys()
    # By that name the API takes a request.
    assert "api" in settings.allowed_hosts
    shared = [set(SERVICES[name].get("networks", {"default": {}})) for name in ("api", "worker")]
    assert all("default" in networks for networks in shared)


@pytest.mark.parametrize("name", ["triton-cpu", "triton-gpu", "triton-mock"])
def test_a_triton_is_checked_by_a_generation_and_supervised(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"] == ["CMD", "python3", "/opt/llm/health", "check"]
    if name == "triton-gpu":  # NVIDIA's image
        assert "./triton/health:/opt/llm/health:ro" in service["volumes"]
        command = service["command"]
    else:
        dockerfile = (ROOT / "triton" / "Dockerfile").read_text()
        assert "\nCOPY health /opt/llm/health\n" in dockerfile
        assert 'ENTRYPOINT ["/opt/llm/entrypoint.sh"]' in dockerfile
        (start,) = re.findall(
            r"(?m)^exec (.*?[^\\])$", (ROOT / "triton" / "entrypoint.sh").read_text(), re.DOTALL
        )
        command = start.replace("\\\n", " ").split()
    assert command[:3] == ["python3", "/opt/llm/health", "run"]
    assert "--" in command
    # The container's end leaves the supervisor time for an orderly one.
    assert int(service["stop_grace_period"].removesuffix("s")) > 35
