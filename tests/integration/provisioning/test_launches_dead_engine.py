"""Launched servers whose engine dies behind a ready model: restarted in the job, or reloaded, or ended."""

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.core.settings import Settings
from app.provisioning.engine_probe import dead_reason, dead_since
from app.provisioning.local import processes_of
from tests.conftest import ROOT, SCRIPTED, TRITON_VENV, Service, run_service
from tests.integration.deployment.test_health_check import MODEL, generate
from tests.integration.launching import (
    EMBEDDED,
    launch,
    stop,
    triton_of,
    until_state,
    with_profiles,
)
from tests.integration.support import until

TRITON = ROOT / "triton"
# Fails every request after the prompt "die" until it is loaded again, as NVIDIA's backend does.
MORTAL = """
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
            self.is_dead = getattr(self, "is_dead", False) or prompt == b"die"
            if self.is_dead or STAYS_DEAD:
                error = pb_utils.TritonError("Error generating stream: EngineCore is dead")
                response = pb_utils.InferenceResponse(error=error)
                request.get_response_sender().send(response, flags=1)
            else:
                self.answer(request.get_response_sender())
"""
PROFILES = f"""
[profiles.here]
provider = "local"
home = "HOME"
idle_minutes = 0
{EMBEDDED}
[profiles.plain]
provider = "local"
home = "HOME"
idle_minutes = 0
model_roots = ["HOME/models"]
triton_entries = true
runtime = "plain"
command = ["sh", "{TRITON / "serve.sh"}", "{TRITON_VENV}", "HOME/work"]
"""


@pytest.fixture
async def launching(settings: Settings, tmp_path: Path) -> AsyncIterator[Service]:
    async with run_service(
        with_profiles(settings, tmp_path, PROFILES), with_worker=True
    ) as service:
        yield service
    for folder in (tmp_path / "home" / "launches").glob("*"):
        for pid in processes_of(UUID(folder.name)):
            os.kill(pid, signal.SIGKILL)


async def launch_mortal(service: Service, folder: Path, stays_dead: str, **members: Any) -> str:
    """Launch the mortal model on a server without a supervisor; returns the launch's id."""
    entry = folder / "home" / "models" / "mortal"
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text((SCRIPTED["scripted"] / "config.pbtxt").read_text())
    (entry / "1" / "model.py").write_text(f"STAYS_DEAD = {stays_dead}\n{MODEL}{MORTAL}")
    layout: list[str | Path] = ["sh", TRITON / "layout.sh", TRITON_VENV, TRITON / "backends"]
    subprocess.run([*layout, folder / "home" / "work"], check=True)
    accepted = await launch(service, profile="plain", model=str(entry), **members)
    return str(accepted["id"])


async def answers(service: Service, launch_id: str, model: str) -> bool:
    async with await triton_of(service, launch_id) as client:
        try:
            return bool([delta async for delta in client.generate(model, "a", {"max_tokens": 1})])
        except Exception:  # noqa: BLE001 - it is missing, or dead
            return False


@pytest.mark.trial
async def test_a_supervised_job_restarts_its_server(launching: Service) -> None:
    accepted = await launch(launching, provider="local")
    healthy = await until_state(launching, accepted["id"], "healthy")
    address = healthy["server"]["grpc"]
    servers = {pid for pid in processes_of(UUID(accepted["id"])) if is_triton(pid)}
    async with await triton_of(launching, accepted["id"]) as client:
        # Triton leaves its stream open until the supervisor kills the server.
        await generate(client, "scripted", "{{crash_at=0}}")
    await until(lambda: answers(launching, accepted["id"], "scripted"), 60)
    healthy = await until_state(launching, accepted["id"], "healthy")
    assert healthy["server"]["grpc"] == address
    assert not servers & set(processes_of(UUID(accepted["id"])))
    log = (await launching.client.get(f"/launches/{accepted['id']}/log")).json()["log"]
    assert "supervisor: restart in 1 s: model scripted: Stub process" in log
    ended = await stop(launching, accepted["id"])
    assert ended["state"] == "stopped"
    assert not processes_of(UUID(accepted["id"]))


def is_triton(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver"


@pytest.mark.trial
async def test_a_dead_engine_without_a_supervisor_is_reloaded(
    launching: Service, tmp_path: Path
) -> None:
    launch_id = await launch_mortal(launching, tmp_path, "False")
    await until_state(launching, launch_id, "healthy")
    async with await triton_of(launching, launch_id) as client:
        await generate(client, "mortal", "die")
    found = await until_state(launching, launch_id, "unhealthy")
    assert dead_since(found["reason"]) is not None
    assert "Error generating stream: EngineCore is dead" in found["reason"]
    found = await until_state(launching, launch_id, "healthy")
    assert found["reason"] == ""
    assert await answers(launching, launch_id, "mortal")
    await stop(launching, launch_id)


@pytest.mark.trial
async def test_an_engine_that_stays_dead_ends_its_job(launching: Service, tmp_path: Path) -> None:
    launch_id = await launch_mortal(launching, tmp_path, "True", start_minutes=0.25)
    ended = await until_state(launching, launch_id, "failed", seconds=90)
    assert ended["reason"].startswith("engine dead since ")
    assert ended["reason"].endswith(
        "It did not recover within 0.25 minutes: launch it again; `supervise = true` in the profile "
        "'plain' has its job restart the server"
    )
    assert not processes_of(UUID(launch_id))


def test_the_reason_keeps_the_time_of_the_first_finding() -> None:
    first, later = datetime.fromisoformat("2026-11-23T10:00:00+00:00"), datetime.now().astimezone()
    reason = dead_reason("no engine", first, "the server does not answer")
    assert reason == "engine dead since 2026-11-23T10:00:00+00:00: no engine"
    assert dead_since(dead_reason("still none", later, reason)) == first
    assert dead_since("the server does not answer") is None
