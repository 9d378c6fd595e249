"""Shared by the tests of launches: profiles of this machine, and a service that launches."""

import os
from pathlib import Path
from typing import Any
from uuid import UUID

from pydantic import SecretStr

from app.api.container import Services
from app.cli.up import processes
from app.cli.up.service import ServicePart
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM
from app.inference.triton_client import TritonClient
from tests.conftest import ROOT, TRITON_VENV, Service
from tests.integration.support import until

EMBEDDED = f"""
runtime = "embedded"
venv = "{TRITON_VENV}"
triton = "{ROOT / "triton"}"
model_roots = ["{ROOT / "triton" / "models"}", "HOME/models"]
triton_entries = true
"""
SCRIPTED = str(ROOT / "triton" / "models" / "scripted")
FAST = {
    "launch_poll_seconds": 0.2,
    "launch_lease_seconds": 6.0,
    "launch_drain_seconds": 5.0,
}
OPEN = ("submitted", "pending", "starting", "healthy", "unhealthy", "stopping")


def with_profiles(settings: Settings, folder: Path, text: str, **changes: object) -> Settings:
    """Settings of a service that has these profiles; `HOME` stands for a folder of the test's."""
    file = folder / "profiles.toml"
    file.write_text(text.replace("HOME", str(folder / "home")))
    return settings.model_copy(update={"profiles_file": file, **FAST, **changes})


class Worker(ServicePart):
    """`python -m app worker` as a process, to be killed."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(
            "worker", "worker", environment_of(settings), folder / "worker.log", grace=10
        )

    async def kill(self) -> None:
        """As `kill -9` does: nothing is handed over."""
        assert self._process is not None
        self._process.kill()
        await processes.wait_exit(self._process)


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment of a process with these settings."""
    environment = dict(os.environ)
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        alias = Settings.model_fields[name].alias
        assert alias is not None
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        environment[alias] = ",".join(text) if isinstance(text, list) else str(text)
    return environment


async def launch(service: Service, **members: object) -> dict[str, Any]:
    """Launch the scripted model; the accepted launch."""
    body = {"name": "one", "model": SCRIPTED} | members
    answer = await service.client.post("/launches", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/launches/{answer.json()['id']}"
    accepted: dict[str, Any] = answer.json()
    return accepted


async def triton_of(service: Service, launch_id: str) -> TritonClient:
    """A client of a launch's server."""
    services: Services = service.app.state.services
    found = await services.launches.get(DEFAULT_TEAM, UUID(launch_id))
    assert found.address is not None
    return TritonClient(found.address["grpc"], found.secret)


async def read_launch(service: Service, launch_id: str) -> dict[str, Any]:
    answer = await service.client.get(f"/launches/{launch_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def until_state(
    service: Service, launch_id: str, *states: str, seconds: float = 40.0
) -> dict[str, Any]:
    """The launch once it is in one of these states; fails at once when it ended in another."""

    async def is_there() -> dict[str, Any] | None:
        found = await read_launch(service, launch_id)
        if found["state"] in states:
            return found
        log = (await service.client.get(f"/launches/{launch_id}/log")).json()["log"]
        assert found["state"] in OPEN, (found, log)
        return None

    reached: dict[str, Any] = await until(is_there, seconds)
    return reached


async def stop(service: Service, launch_id: str) -> dict[str, Any]:
    """Stop a launch, and wait for its end."""
    answer = await service.client.post(f"/launches/{launch_id}/stop")
    assert answer.status_code == 202, answer.text
    return await until_state(service, launch_id, "stopped", "failed", "timeout")
