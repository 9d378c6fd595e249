"""Launches on this machine: processes that outlive their worker, and none that outlives its launch."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from app.core.settings import Settings
from app.inference.triton_client import TritonClient
from app.provisioning.local import processes_of
from tests.conftest import ROOT, Service, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.launching import (
    EMBEDDED,
    SCRIPTED,
    Worker,
    environment_of,
    launch,
    stop,
    until_state,
    with_profiles,
)
from tests.integration.queue.test_teams import BLUE, RED
from tests.integration.support import assert_problem, until
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

PROFILES = f"""
[profiles.here]
provider = "local"
home = "HOME"
idle_minutes = 0
{EMBEDDED}
[profiles.silent]
provider = "local"
home = "HOME"
idle_minutes = 0
model_roots = ["{Path(SCRIPTED).parent}"]
triton_entries = true
runtime = "plain"
command = ["sh", "-c", "sleep 300"]
[profiles.cached]
provider = "local"
home = "HOME"
cache = "HOME"
idle_minutes = 0
model_roots = ["HOME/models"]
runtime = "plain"
command = ["sh", "-c", "sleep 300"]
[profiles.strict]
provider = "local"
home = "HOME"
model_roots = ["HOME/models"]
runtime = "plain"
"""


@pytest.fixture
def launching_settings(settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    yield with_profiles(settings, tmp_path, PROFILES)
    for folder in (tmp_path / "home" / "launches").glob("*"):
        for pid in processes_of(UUID(folder.name)):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def launching(launching_settings: Settings) -> AsyncIterator[Service]:
    async with run_service(launching_settings, with_worker=True) as service:
        yield service


def processes(launched: dict[str, str]) -> set[int]:
    return set(processes_of(UUID(launched["id"])))


@pytest.mark.trial
async def test_a_server_outlives_its_worker_and_not_its_launch(
    launching_settings: Settings, tmp_path: Path
) -> None:
    async with run_service(launching_settings, with_worker=False) as service:
        worker = Worker(launching_settings, tmp_path)
        await worker.start()
        accepted = await launch(service, provider="local")
        healthy = await until_state(service, accepted["id"], "healthy")
        before = processes(accepted)
        assert len(before) >= 3  # the script, the server, the model
        for pid in before:
            assert b"LLM_DATABASE" not in Path(f"/proc/{pid}/environ").read_bytes()
        await worker.kill()
        assert processes(accepted) == before
        async with TritonClient(healthy["server"]["grpc"]) as client:
            assert await client.is_live()
        await worker.start()
        ended = await stop(service, accepted["id"])
        assert (ended["state"], ended["reason"]) == ("stopped", "stopped on request")
        await worker.stop()
    assert not processes(accepted)
    assert list((tmp_path / "home" / "launches").iterdir()) == []


async def test_a_server_that_is_killed(launching: Service, tmp_path: Path) -> None:
    accepted = await launch(launching, profile="silent")
    await until_state(launching, accepted["id"], "starting")
    for pid in sorted(processes(accepted)):  # the script first: it would report
        os.kill(pid, signal.SIGKILL)
    ended = await until_state(launching, accepted["id"], "failed")
    assert "it left no exit status" in ended["reason"]
    assert list((tmp_path / "home" / "launches").iterdir()) == []


async def test_the_time_limit_of_a_local_launch(launching: Service) -> None:
    accepted = await launch(launching, profile="silent", time_limit_minutes=1)
    await until_state(launching, accepted["id"], "starting")
    await launching.services.database.fetch(
        "UPDATE launches SET started_at = now() - interval '1 minute'"
    )
    ended = await until_state(launching, accepted["id"], "timeout")
    assert ended["reason"] == "the time limit of 1 minutes was reached"
    assert not processes(accepted)


async def test_models_that_lead_out_of_their_root(launching: Service, tmp_path: Path) -> None:
    root = tmp_path / "home" / "models"
    root.mkdir(parents=True)
    (root / "out").symlink_to(tmp_path)
    (root / "entry").mkdir()
    (root / "entry" / "config.pbtxt").touch()
    (root / "empty").mkdir()
    for name, words in (
        ("out", "leads out of the profile's model roots"),
        ("entry", "does not allow that (triton_entries)"),
        ("empty", "it is not a model"),
        ("absent", "it is not a model"),
    ):
        accepted = await launch(launching, profile="strict", model=str(root / name), name=name)
        ended = await until_state(launching, accepted["id"], "failed")
        assert words in ended["reason"]
        assert ended["submitted_at"] is None


async def test_adapters_that_cannot_be_served(launching: Service, tmp_path: Path) -> None:
    root = tmp_path / "home" / "models"
    for name, config in (
        ("model", "{}"),
        ("wide", '{"r": 999}'),
        ("fine", '{"r": 8}'),
        ("no", "["),
    ):
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text(config)
    (root / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (root / "out").symlink_to(tmp_path)
    small: dict[str, object] = {"max_lora_rank": 1}
    for name, engine, words in (
        ("out", {}, "The adapter a's path leads out of the profile's model roots"),
        ("no", {}, "has no adapter_config.json of a LoRA adapter (a)"),
        ("absent", {}, "has no adapter_config.json of a LoRA adapter (a)"),
        ("wide", {}, "An adapter has the rank 999; the engine's limit is 512"),
        ("fine", small, "An adapter has the rank 8; the engine's limit is 1"),
    ):
        accepted = await launch(
            launching, profile="strict", model=str(root / "model"), name=name, engine=engine,
            adapters={"a": str(root / name)},
        )  # fmt: skip
        ended = await until_state(launching, accepted["id"], "failed")
        assert words in ended["reason"]
        assert ended["submitted_at"] is None
    accepted = await launch(launching, profile="here", adapters={"a": "org/a"})
    ended = await until_state(launching, accepted["id"], "failed")
    assert "a launch cannot name others" in ended["reason"]


@pytest.mark.parametrize("place", ["directory", "cache"])
@pytest.mark.trial
async def test_an_encoder_decoder_is_refused_before_its_job(
    launching: Service, tmp_path: Path, place: str
) -> None:
    home, commit = tmp_path / "home", "a" * 40
    t5, llama = (
        '{"architectures": ["T5ForConditionalGeneration"]}',
        '{"architectures": [["T5"], 5]}',
    )
    for name, config in (("t5", t5), ("llama", llama), ("broken", "{")):
        if place == "directory":
            weights, model = home / "models" / name, str(home / "models" / name)
        else:
            repository = home / "hub" / f"models--a--{name}"
            weights, model = repository / "snapshots" / commit, f"a/{name}"
            (repository / "refs").mkdir(parents=True)
            (repository / "refs" / "main").write_text(commit)
        weights.mkdir(parents=True)
        (weights / "config.json").write_text(config)
        accepted = await launch(launching, profile="cached", model=model, name=name)
        if name == "t5":
            ended = await until_state(launching, accepted["id"], "failed")
            assert f"{model} is an encoder-decoder model" in ended["reason"]
            assert ended["submitted_at"] is None
        else:
            await until_state(launching, accepted["id"], "starting")
            await stop(launching, accepted["id"])


async def test_names_are_taken_while_a_launch_is_open(launching: Service) -> None:
    accepted = await launch(launching, profile="silent")
    again = {"name": "one", "model": SCRIPTED, "profile": "silent"}
    assert_problem(await launching.client.post("/launches", json=again), 409, "conflict")
    early = await launching.client.delete(f"/launches/{accepted['id']}")
    assert_problem(early, 409, "conflict")
    await stop(launching, accepted["id"])
    other = await launch(launching, profile="silent")
    await stop(launching, other["id"])
    listed = (await launching.client.get("/launches")).json()
    assert [one["id"] for one in listed] == [other["id"], accepted["id"]]
    assert (await launching.client.get("/launches?state=healthy")).json() == []
    assert (await launching.client.delete(f"/launches/{accepted['id']}")).status_code == 204
    gone = await launching.client.get(f"/launches/{accepted['id']}")
    assert_problem(gone, 404, "not_found")


@pytest.mark.trial
async def test_a_stop_before_the_submission_leaves_nothing(
    launching_settings: Settings, tmp_path: Path
) -> None:
    async with run_service(launching_settings, with_worker=False) as service:
        accepted = await launch(service, profile="silent")
        await service.client.post(f"/launches/{accepted['id']}/stop")
        worker = Worker(launching_settings, tmp_path)
        await worker.start()
        ended = await until_state(service, accepted["id"], "stopped")
        assert (ended["job_id"], ended["submitted_at"]) == (None, None)
        await worker.stop()
    assert not processes(accepted)


async def test_a_dry_run_shows_the_script_and_starts_nothing(
    launching: Service, tmp_path: Path
) -> None:
    engine = {"max_num_seqs": 8, "kv_cache_dtype": "fp8"}
    body = {"name": "one", "model": SCRIPTED, "provider": "local", "engine": engine}
    answer = await launching.client.post("/launches?dry_run=true", json=body)
    assert answer.status_code == 200
    settings = {"model": SCRIPTED, "enforce_eager": True} | engine
    assert answer.json()["model_json"] == settings
    assert "serve.sh" in answer.json()["script"]
    assert answer.json()["spec"]["served_name"] == "scripted"
    assert (await launching.client.get("/launches")).json() == []
    assert not (tmp_path / "home").exists()


async def test_a_server_of_that_name(launching: Service) -> None:
    await launching.services.database.fetch(
        "INSERT INTO servers (name, grpc) VALUES ('one', '127.0.0.1:1')"
    )
    body = {"name": "one", "model": SCRIPTED, "profile": "silent"}
    assert_problem(await launching.client.post("/launches", json=body), 409, "conflict")


async def test_profiles_and_catalogue_are_shown(launching: Service, tmp_path: Path) -> None:
    shown = (await launching.client.get("/launches/profiles")).json()
    assert [one["name"] for one in shown] == ["here", "silent", "cached", "strict"]
    assert "home" not in shown[0]
    assert (await launching.client.get("/launches/catalogue")).json() == []


async def test_options_of_the_engine_are_listed(launching: Service) -> None:
    shown = (await launching.client.get("/launches/engine-options")).json()
    found = {one["name"]: one for one in shown["options"]}
    assert found["kv_cache_dtype"]["access"] == "free"
    assert "fp8" in found["kv_cache_dtype"]["choices"]
    assert found["max_num_seqs"]["types"] == ["int"]
    assert found["hf_overrides"]["access"] == "profile"
    assert "secret" in found["hf_token"]["reason"]


async def test_an_entry_takes_no_options_of_the_engine(launching: Service) -> None:
    """Its own model.json has them: options that had no effect would be a surprise."""
    accepted = await launch(launching, profile="here", engine={"max_num_seqs": 8})
    ended = await until_state(launching, accepted["id"], "failed")
    assert "a launch cannot set max_num_seqs" in ended["reason"]
    assert ended["submitted_at"] is None


def command(settings: Settings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "app", "launch", *arguments],
        cwd=ROOT, env=environment_of(settings), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.trial
def test_the_command_line(launching_settings: Settings) -> None:
    settings = launching_settings
    shown = command(settings, "create", "one", SCRIPTED, "--profile", "silent", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("==> job.sh <==\n#!/bin/bash")
    _, separator, arguments = shown.stdout.partition("\n==> model.json <==\n")
    assert separator
    assert json.loads(arguments) == {"model": SCRIPTED, "enforce_eager": True}
    nodes = command(settings, "create", "one", SCRIPTED, "--profile", "silent", "--nodes", "2")
    assert (nodes.returncode, "resources.nodes: only Slurm" in nodes.stderr) == (2, True)
    made = command(settings, "create", "one", SCRIPTED, "--profile", "silent", "--cpus", "2",
                   "--engine-option", "max-num-seqs=8", "--engine-option", "kv_cache_dtype=fp8",
                   "--adapter", "sheep=org/sheep")  # fmt: skip
    assert made.returncode == 0, made.stderr
    launch_id = made.stdout.strip()
    again = command(settings, "create", "one", SCRIPTED, "--profile", "silent")
    assert (again.returncode, "is taken" in again.stderr) == (1, True)
    option = ("--engine-option", "max_num_sqes=1")
    unknown = command(settings, "create", "two", SCRIPTED, "--profile", "silent", *option)
    assert (unknown.returncode, "near it: max_num_seqs" in unknown.stderr) == (2, True)
    listed = command(settings, "engine-options", "kv-cache-dtype").stdout
    assert "fp8_e4m3" in listed
    assert "max_num_seqs" not in listed
    evil = command(settings, "create", "$(x)", SCRIPTED, "--profile", "silent")
    assert (evil.returncode, evil.stderr.startswith("name: ")) == (2, True)
    head, line = command(settings, "list").stdout.splitlines()
    assert head.split()[:3] == ["ID", "NAME", "STATE"]
    assert line.split()[:4] == [launch_id, "one", "submitted", "silent"]
    spec = json.loads(command(settings, "show", launch_id).stdout)["spec"]
    assert (spec["cpus"], spec["engine"]["max_num_seqs"]) == (2, 8)
    assert spec["engine"]["kv_cache_dtype"] == "fp8"
    assert spec["adapters"] == {"sheep": "org/sheep"}
    assert command(settings, "delete", launch_id).returncode == 1
    assert '"state": "stopping"' in command(settings, "stop", launch_id).stdout
    assert command(settings, "log", launch_id).stdout == ""
    broken = settings.model_copy(update={"profiles_file": ROOT / "pyproject.toml"})
    wrong = command(broken, "create", "one", SCRIPTED)
    assert (wrong.returncode, "LLM_PROFILES_FILE" in wrong.stderr) == (2, True)


async def test_a_launch_is_its_teams_and_an_operators(guarded: Settings, tmp_path: Path) -> None:
    settings = with_profiles(guarded, tmp_path, PROFILES)
    body = {"name": "one", "model": SCRIPTED, "profile": "silent"}
    user = bearer(sign({"team_id": "red", "token_id": "u"}))
    async with run_service(settings, with_worker=False) as service:
        client = service.client
        assert_problem(await client.post("/launches", json=body, headers=user), 403, "forbidden")
        made = await client.post("/launches", json=body, headers=RED)
        assert made.status_code == 202, made.text
        url = made.headers["location"]
        for method, path in (("GET", "/log"), ("POST", "/stop"), ("DELETE", "")):
            refused = await client.request(method, url + path, headers=user)
            assert_problem(refused, 403, "forbidden")
        assert (await client.get(url, headers=user)).json()["state"] == "submitted"
        assert (await client.get("/launches", headers=BLUE)).json() == []
        assert_problem(await client.get(url, headers=BLUE), 404, "not_found")
        assert_problem(await client.post(f"{url}/stop", headers=BLUE), 404, "not_found")
        assert (await client.get(url, headers=RED)).json()["state"] == "submitted"


async def test_bad_bodies_of_launches(launching: Service) -> None:
    for body, field in (
        ({"name": "$(x)", "model": SCRIPTED}, "name"),
        ({"name": "one", "model": f"{SCRIPTED}/../../x"}, "model"),
        ({"name": "one", "model": SCRIPTED, "profile": "-oProxyCommand=x"}, "profile"),
        ({"name": "one", "model": SCRIPTED, "host": "evil"}, "host"),
        ({"name": "one", "model": SCRIPTED, "trust_remote_code": True}, "trust_remote_code"),
        *(
            ({"name": "one", "model": SCRIPTED, "engine": {name: value}}, f"engine.{name}")
            for name, value in (("max_num_sqes", 1), ("max_num_seqs", "1"), ("worker_cls", "a.B"))
        ),
    ):
        answer = await launching.client.post("/launches", json=body)
        assert_problem(answer, 422, "invalid_request", field)
    assert (await launching.client.get("/launches")).json() == []


def write_entry(tmp_path: Path) -> Path:
    """An entry whose model.json has a path relative to the server's directory, as the demo model's."""
    entry = tmp_path / "home" / "models" / "relative"
    shutil.copytree(SCRIPTED, entry)
    (entry / "1" / "model.json").write_text('{"model": "models/relative/1"}')
    with (entry / "1" / "model.py").open("a") as code:
        code.write(
            "import json, pathlib\n"
            "_path = json.loads(pathlib.Path(__file__).with_name('model.json').read_text())['model']\n"
            "if not pathlib.Path(_path).is_dir():\n"
            "    raise OSError(f'{_path} is no directory')\n"
        )
    return entry


@pytest.mark.parametrize("name", ["relative", "other"])
@pytest.mark.trial
async def test_an_entry_with_a_relative_path_takes_any_name(
    launching: Service, tmp_path: Path, name: str
) -> None:
    entry = write_entry(tmp_path)
    accepted = await launch(launching, provider="local", model=str(entry), served_name=name)
    await until_state(launching, accepted["id"], "healthy")

    async def is_there() -> bool:
        answer = await launching.client.get(f"/models/{name}")
        return answer.status_code == 200 and bool(answer.json()["ready"])

    await until(is_there)
    await stop(launching, accepted["id"])


@pytest.mark.trial
async def test_the_reason_names_the_error_not_the_end_of_its_trace(
    launching: Service, tmp_path: Path
) -> None:
    entry = write_entry(tmp_path)
    (entry / "1" / "model.json").write_text('{"model": "models/elsewhere/1"}')
    accepted = await launch(launching, provider="local", model=str(entry))
    ended = await until_state(launching, accepted["id"], "failed")
    assert ended["reason"].endswith("OSError: models/elsewhere/1 is no directory"), ended["reason"]
