"""MOCK_MODEL=1: the container of docker-compose's profile `mock`, and a service in front of it.

The entry point runs as it is in the image, on a real tritonserver: only its directories are this
machine's, and its ports free ones.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

import pytest

from app.cli.up import processes
from app.core.settings import Settings
from tests.conftest import ROOT, TRITON_VENV, make_settings, run_service
from tests.integration.deployment.test_compose import COMPOSE, SERVICES, environment, interpolate
from tests.integration.support import until, write_model
from tests.postgres import PostgresServer

SECRET = uuid5(NAMESPACE_URL, "mock container").hex


def entry_point(directory: Path) -> Path:
    """The image's entry point, with the image's directories below `directory`."""
    home = directory / "opt"
    home.mkdir()
    for name in ("models", "health", "backends", "serve.sh"):
        (home / name).symlink_to(ROOT / "triton" / name)
    subprocess.run(
        ["sh", ROOT / "triton" / "layout.sh", TRITON_VENV, home / "backends", home / "work"],
        check=True,
        capture_output=True,
    )
    text = (ROOT / "triton" / "entrypoint.sh").read_text()
    moved = directory / "entrypoint.sh"
    moved.write_text(
        text.replace("/opt/llm", str(home))
        .replace(" /venv ", f" {TRITON_VENV} ")
        .replace("=/models", f"={directory}/models")
    )
    return moved


@contextlib.asynccontextmanager
async def container(directory: Path, **variables: str) -> AsyncIterator[str]:
    """Run the entry point; yields the address of gRPC."""
    ports = {name: processes.free_port() for name in ("http", "grpc", "metrics")}
    given = {
        "PATH": os.environ["PATH"],
        "LLM_TRITON_SECRET": SECRET,
        "TRITON_BIND_ADDRESS": "127.0.0.1",
        "TRITON_HTTP_SERVICE": f"127.0.0.1:{ports['http']}",
    }
    arguments = [f"--{name}-port={port}" for name, port in ports.items()]
    with (directory / "container.log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", entry_point(directory), *arguments],
            env=given | variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"127.0.0.1:{ports['grpc']}"
        finally:
            await processes.stop(process, signal.SIGTERM, 40)


def mock_settings(postgres: PostgresServer, database: str, address: str, own: Path) -> Settings:
    """Those of docker-compose's service: /models is `own`, and /mock the mount of it."""
    given = environment(".env.api.dev")
    (source,) = (
        one.split(":")[0] for one in SERVICES["api"]["volumes"] if one.split(":")[1] == "/mock"
    )
    assert given["LLM_MORE_MODEL_REPOSITORIES"] == "/mock"
    return make_settings(
        postgres,
        database,
        triton_grpc=address,
        triton_secret=SECRET,
        model_repository=own,
        more_model_repositories=[str(ROOT / source)],
    )


@pytest.mark.trial
async def test_the_profile_serves_the_scripted_model(
    postgres_server: PostgresServer, database_name: str, tmp_path: Path
) -> None:
    """Inference, and chat by the template of the scripted model, which LLM_MODEL_REPOSITORY lacks."""
    own = tmp_path / "models"
    write_model(own, "other")
    (variables,) = [SERVICES["triton-mock"]["build"]["args"]]
    async with container(tmp_path, **variables) as address:
        settings = mock_settings(postgres_server, database_name, address, own)
        async with run_service(settings, with_worker=True) as service:
            await until(lambda: _is_ready(service.services.registry.ready()), 60)
            body = {"text": "hi {{chunks=3}}", "max_tokens": "20"}
            answer = await service.client.post("/inference/scripted", json=body)
            assert (answer.status_code, len(answer.text.split())) == (200, 3)
            chat = {
                "model": "scripted",
                "messages": [{"role": "user", "content": "hi {{chunks=3}}"}],
            }
            answer = await service.client.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"][0]["message"]["content"].split()) == 3


async def _is_ready(names: list[str]) -> bool:
    return names == ["scripted"]


@pytest.mark.parametrize(("value", "repository"), [("", "{}/models"), ("0", "{}/models"),
                                                   ("1", "{}/opt/models")])  # fmt: skip
def test_the_variable_selects_the_repository(value: str, repository: str, tmp_path: Path) -> None:
    script = entry_point(tmp_path)
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    given = {"PATH": path, "LLM_TRITON_SECRET": SECRET, "MOCK_MODEL": value}
    ended = subprocess.run(["sh", script], env=given, capture_output=True, text=True, check=True)
    assert f"--model-repository={repository.format(tmp_path)}" in ended.stdout.splitlines()
    assert "--load-model=*" in ended.stdout.splitlines()


def test_another_value_is_refused(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "LLM_TRITON_SECRET": SECRET, "MOCK_MODEL": "yes"}
    ended = subprocess.run(
        ["sh", entry_point(tmp_path)],
        env=given, capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr == "MOCK_MODEL must be 0 or 1, not 'yes'.\n"


def test_the_image_of_the_profile_has_neither_vllm_nor_a_gpu() -> None:
    service = SERVICES["triton-mock"]
    assert (service["profiles"], service["build"]["args"]) == (["mock"], {"MOCK_MODEL": "1"})
    assert "deploy" not in service
    assert not service.get("volumes")
    dockerfile = (ROOT / "triton" / "Dockerfile").read_text()
    # The argument reaches the entry point.
    assert "\nARG MOCK_MODEL=0\nENV MOCK_MODEL=$MOCK_MODEL\n" in dockerfile
    assert "\nCOPY models /opt/llm/models\n" in dockerfile
    light = (ROOT / "triton" / "requirements-light.txt").read_text()
    assert "vllm" not in light
    assert COMPOSE["services"]["triton-cpu"]["image"] != service["image"]


def test_the_image_of_vllm_serves_the_scripted_model_too() -> None:
    given = SERVICES["triton-cpu"]["environment"]["MOCK_MODEL"]
    assert (given, interpolate(given)) == ("${MOCK_MODEL:-0}", "0")


def test_make_takes_the_variable() -> None:
    for arguments, is_light in ((["MOCK_MODEL=1"], True), (["MOCK_MODEL=0"], False), ([], False)):
        planned = subprocess.run(
            ["make", "--dry-run", "run", "GPU=0", *arguments],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ("--light" in planned.stdout) is is_light, planned.stderr
