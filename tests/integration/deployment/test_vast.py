"""Vast.ai by make: the real CLI against a stand-in of its API, and a real sshd as the instance.

Behind the sshd is the embedded tritonserver, started as on a rented machine.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from app.cli.up.processes import free_port
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import GenerationError
from tests.conftest import ROOT, SCRIPTED, TRITON_VENV, Service
from tests.integration.support import fresh_database, read, serve, until
from tests.integration.vast_stand_in import (
    API_KEY,
    CHEAP,
    DEAR,
    FAIR,
    TAKEN,
    VastApi,
    missing_programs,
    run_sshd,
    serve_api,
)
from tests.postgres import PostgresServer

VAST = ROOT / "nvidia_triton"
HF_TOKEN = "hf_very_secret"
DEADLINE_SECONDS = 90
NASTY = "-oProxyCommand=touch MARK;$(touch MARK)`touch MARK`\n$(shell touch MARK)../../"

pytestmark = [pytest.mark.trial, pytest.mark.shard("vast"), pytest.mark.timeout(300)]


@dataclass
class Machine:
    """An instance and the account it belongs to, as make sees them."""

    folder: Path
    api: VastApi
    definition: dict[str, Any]

    def environment(self, **changes: str) -> dict[str, str]:
        """The environment of make and its children; `unset` removes a variable."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "VAST_URL": self.api.url,
            "VAST_API_KEY": API_KEY,
            "HF_TOKEN": HF_TOKEN,
            "DEFINITION": str(self.folder / "definition.yaml"),
            "STATE_DIR": str(self.folder / "state"),
            "PRIVATE_SSH_KEY": str(self.folder / "key"),
            # These have no influence on the definition, unless they are given to make.
            "LABEL": "from the environment",
            "ENV": "/etc/profile",
            "DISK": "3",
            **changes,
        }
        return {name: value for name, value in environment.items() if value != "unset"}

    def run(
        self,
        target: str,
        *,
        stdin: str = "",
        env: dict[str, str] | None = None,
        **variables: object,
    ) -> "subprocess.CompletedProcess[str]":
        """`make TARGET NAME=VALUE...` as a user runs it."""
        return self._run(
            ["make", target, *[f"{name}={value}" for name, value in variables.items()]],
            stdin,
            self.environment(**(env or {})),
        )

    def shell(self, command: str, stdin: str = "", **env: str) -> str:
        """The output of a document's line."""
        ended = self._run(["bash", "-euc", command], stdin, self.environment(**env))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def _run(
        self, command: list[str], stdin: str, env: dict[str, str]
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=VAST, env=env, input=stdin, capture_output=True, text=True, check=False,
            timeout=DEADLINE_SECONDS,
        )  # fmt: skip

    def make(self, target: str, **options: Any) -> str:
        """The output of a target that succeeds."""
        ended = self.run(target, **options)
        assert ended.returncode == 0, ended.stderr
        assert HF_TOKEN not in ended.stdout + ended.stderr
        assert API_KEY not in ended.stdout + ended.stderr
        return ended.stdout

    def refused(self, target: str, **options: Any) -> str:
        """The one line that a target ends with, apart from make's own."""
        ended = self.run(target, **options)
        assert ended.returncode != 0, ended.stdout
        assert API_KEY not in ended.stdout + ended.stderr
        lines = [line for line in ended.stderr.splitlines() if not line.startswith("make: ***")]
        assert len(lines) == 1, ended.stderr
        return lines[0]

    def server(self) -> psutil.Process | None:
        """The tritonserver on the instance."""
        with contextlib.suppress(FileNotFoundError, psutil.Error, ValueError):
            noted = (self.folder / "opt" / "models.server" / "process").read_text()
            process = psutil.Process(int(noted.split()[0]))
            if process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def kill(self) -> None:
        """End the tritonserver with no question."""
        if server := self.server():
            for process in [server, *server.children(recursive=True)]:
                process.kill()
            server_ended, _ = psutil.wait_procs([server], timeout=DEADLINE_SECONDS)
            assert server_ended

    def wait_for_health(self, health: str) -> None:
        """Wait until make prints it."""
        started = time.monotonic()
        while self.make("check-health-tritonserver") != f"{health}\n":
            assert time.monotonic() - started < DEADLINE_SECONDS, self.make(
                "check-logs-tritonserver", LOG_LINES=20, CONTRACT_ID=max(self.api.rows)
            )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The account, empty; the instance, with nothing running."""
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)}")
    assert (VAST / ".venv" / ".ready").exists(), "make -C nvidia_triton .venv"
    folder = tmp_path_factory.mktemp("vast")
    (folder / "home").mkdir()
    shutil.copytree(SCRIPTED["scripted"], folder / "models" / "scripted")
    with run_sshd(folder) as ssh_port, serve_api(VastApi(ssh_port)) as api:
        machine = Machine(folder, api, _definition(folder))
        (folder / "definition.yaml").write_text(yaml.safe_dump(machine.definition))
        _lay_out(folder)
        yield machine


@pytest.fixture(autouse=True)
def tidy(machine: Machine) -> Iterator[None]:
    """Leave nothing for the next test: no instance, no server, no tunnels."""
    yield
    machine.api.rows.clear()
    machine.kill()
    for control in machine.folder.glob("state/*/tunnels.sock"):
        exit_tunnels: list[str | Path] = ["ssh", "-F", "none", "-S", control, "-O", "exit", "x"]
        subprocess.run(exit_tunnels, check=False, capture_output=True)


def _definition(folder: Path) -> dict[str, Any]:
    """The repository's own, with the ports and folders of this instance."""
    definition: dict[str, Any] = yaml.safe_load(
        (VAST / "vastai_instance_definition.yaml").read_text()
    )
    ports = ("http_port", "grpc_port", "metrics_port")
    for name in (*ports, *[f"triton_{port}" for port in ports]):
        definition[name] = free_port()
    return definition | {
        "env": "-e TZ=UTC -e HF_TOKEN -p 8080:8080",
        "models": "models",
        "model_dir": str(folder / "opt" / "models"),
        "tritonserver": str(folder / "tritonserver"),
        "wait_minutes": 2,
    }


def _lay_out(folder: Path) -> None:
    """A `tritonserver` that starts like the one of NVIDIA's image."""
    scripts = ROOT / "triton"
    layout: list[str | Path] = [
        "sh",
        scripts / "layout.sh",
        TRITON_VENV,
        scripts / "backends",
        folder / "work",
    ]
    subprocess.run(layout, check=True)
    program = folder / "tritonserver"
    program.write_text(
        f'#!/bin/sh\nexec sh {scripts / "serve.sh"} {TRITON_VENV} {folder / "work"} "$@"\n'
    )
    program.chmod(0o755)


@pytest.fixture
def instance(machine: Machine) -> int:
    """A CONTRACT_ID that runs."""
    return machine.api.rent(CHEAP)


def documented() -> list[list[str]]:
    """The commands of docs/vast.md, by its blocks of shell."""
    text = (ROOT / "docs" / "vast.md").read_text().replace("\\\n", "")
    blocks = [block.split("```")[0] for block in text.split("```sh\n")[1:]]
    return [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in blocks]


async def test_the_five_commands_of_the_document(
    machine: Machine, postgres_server: PostgresServer, template: str, tmp_path: Path
) -> None:
    api, definition = machine.api, machine.definition
    once, five, own = documented()
    enter, install, _, tell_key = once
    assert enter == "cd nvidia_triton"
    search, bring_up, run, register, destroy = five
    (machine.folder / "home" / ".ssh").mkdir()
    shutil.copy(machine.folder / "key.pub", machine.folder / "home" / ".ssh" / "id_ed25519.pub")
    machine.shell(install)
    machine.shell(tell_key)
    assert api.keys == [(machine.folder / "key.pub").read_text().strip()]
    found = machine.shell(search)
    ids = [line.split()[0] for line in found.splitlines()]
    assert ids == ["INSTANCE_ID", str(CHEAP), str(FAIR), str(TAKEN)]  # DEAR is too dear

    settings = machine.shell(bring_up.replace("...", str(FAIR))).strip()
    named = dict(word.split("=", 1) for word in settings.split())
    assert named == {
        "TRITON_GRPC_SERVICE": f"127.0.0.1:{definition['grpc_port']}",
        "TRITON_HTTP_SERVICE": f"127.0.0.1:{definition['http_port']}",
        "TRITON_METRICS_SERVICE": f"127.0.0.1:{definition['metrics_port']}",
        "LLM_MODEL_REPOSITORY": str(machine.folder / "models"),
    }
    (contract,) = api.rows
    # The third is a service whose own servers and repository have nothing of the instance's.
    assert run == "make -C .. run LIGHT=1"
    without: dict[str, Any] = {"triton_grpc": "", "model_repository": tmp_path}
    async with (
        fresh_database(postgres_server, template, None, **without) as its_settings,
        serve(its_settings, with_worker=True) as service,
    ):
        register = register.replace("8001", str(definition["grpc_port"]))
        register = register.replace("127.0.0.1:8887", service.client.base_url.netloc.decode())
        registered = json.loads(await asyncio.to_thread(machine.shell, register))
        assert registered["healthy"], registered
        await check_an_answer(service)
    check_own_service(machine, own, settings)

    assert machine.make("check-health-tritonserver") == "1\n"
    check_the_rest(machine, contract, settings)

    destroy = destroy.replace("...", str(contract))
    # There is no answer, and an exported CONFIRM does not count.
    asked = machine.run("destroy-instance", env={"CONFIRM": "1"}, CONTRACT_ID=contract)
    assert asked.returncode != 0
    assert f"Destroy instance {contract} (tritonserver, 1 x RTX 4090, running)" in asked.stderr
    assert contract in api.rows
    machine.shell(destroy, stdin="y\n")
    assert contract not in api.rows
    assert not (machine.folder / "state" / str(contract)).exists()
    assert machine.make("show-instances") == ""
    refusal = machine.refused("destroy-instance", CONTRACT_ID=contract)
    assert refusal.startswith(f"You have no instance {contract}: ")


async def check_an_answer(service: Service) -> None:
    """A result of the instance's model, through the tunnel."""
    body = {"model": "scripted", "content": "{{text=one two}}"}

    async def accepted() -> str | None:
        answer = await service.client.post("/results/", json=body)
        return answer.json()["id"] if answer.status_code == 202 else None

    result = await read(service, await until(accepted), wait=30)
    assert (result["state"], result["result"].split()) == ("completed", ["one", "two"])


def check_own_service(machine: Machine, commands: list[str], settings: str) -> None:
    """The environment of the other service, without the database that it would need."""
    take, migrate, serve = commands
    assert take.startswith("SETTINGS=$(make ssh-tunnels-tritonserver CONTRACT_ID=...) && ")
    assert migrate == "make -C .. migrate"
    assert "-m app serve --with-worker" in serve
    script = "from app.core.settings import Settings; print(Settings().triton_grpc)"
    address = machine.shell(
        f"{take.partition(' && ')[2]}\n" + serve.replace("-m app serve --with-worker", f"-c '{script}'"),
        SETTINGS=settings, LLM_DATABASE_URL="db", LLM_DATABASE_ADMIN_USER="llm",
        LLM_DATABASE_PASSWORD="x", LLM_DATABASE_DB="llm",
    ).strip()  # fmt: skip
    assert f"TRITON_GRPC_SERVICE={address}" in settings.split()


def check_the_rest(machine: Machine, contract: int, settings: str) -> None:
    """The other commands, on an instance that is up; at the end Triton and tunnels are gone."""
    with_id: dict[str, Any] = {"CONTRACT_ID": contract}
    stats = json.loads(machine.make("check-model-stats-tritonserver"))
    assert [model["name"] for model in stats["model_stats"]] == ["scripted"]

    # A server that looks every 5 s finds the new model, and never half of it; other things meanwhile.
    second = machine.folder / "models" / "second"
    shutil.copytree(SCRIPTED["scripted"], second)
    machine.make("deploy-models-tritonserver", **with_id)
    started = time.monotonic()
    assert machine.make("check-logs-tritonserver", LOG_LINES=1, **with_id).count("\n") == 1
    assert f"{contract}" in machine.make("show-instances")
    assert machine.run("ssh-instance", stdin="echo $((40+2))\n", **with_id).stdout == "42\n"
    again = machine.run("ssh-tunnels-tritonserver", **with_id)
    assert again.stdout.strip() == settings
    assert "open already" in again.stderr
    while '"second"' not in machine.make("check-model-stats-tritonserver"):
        assert time.monotonic() - started < DEADLINE_SECONDS
    machine.wait_for_health("1")
    log = machine.make("check-logs-tritonserver", **with_id)
    assert "Started HTTPService" in log
    assert log.count("successfully loaded") == 2, log
    assert not re.search(r"failed to load|unloaded", log)
    shutil.rmtree(second)
    (machine.folder / "opt" / "models" / "second").unlink()

    machine.make("kill-tritonserver", **with_id)
    assert machine.server() is None
    assert machine.make("check-health-tritonserver") == "0\n"
    assert "tritonserver runs" in machine.run("run-tritonserver", **with_id).stderr
    first = machine.server()
    machine.wait_for_health("1")
    machine.make("deploy-tritonserver", **with_id)
    assert machine.server() == first, "started twice"

    machine.make("close-tunnels-tritonserver", **with_id)
    assert machine.make("check-health-tritonserver") == "0\n"
    assert machine.refused("check-model-stats-tritonserver").startswith("No Triton answers at")
    assert "were not open" in machine.run("close-tunnels-tritonserver", **with_id).stderr
    check_tunnels_at_another_address(machine, settings, with_id)
    machine.kill()
    assert "No tritonserver runs" in machine.run("kill-tritonserver", **with_id).stderr


def check_tunnels_at_another_address(
    machine: Machine, settings: str, with_id: dict[str, Any]
) -> None:
    """At TUNNELS_ADDRESS, and at no other address."""
    at: dict[str, Any] = {"TUNNELS_ADDRESS": "127.0.0.2"}
    printed = machine.make("ssh-tunnels-tritonserver", **with_id, **at)
    assert printed.strip() == settings.replace("127.0.0.1", "127.0.0.2")
    assert machine.make("check-health-tritonserver", **at) == "1\n"
    assert machine.make("check-health-tritonserver") == "0\n"
    refused = machine.refused("ssh-tunnels-tritonserver", **with_id)
    assert refused.startswith("Other tunnels to instance")
    machine.make("close-tunnels-tritonserver", **with_id)
    at = {"TUNNELS_ADDRESS": "10.99.99.99"}
    refused = machine.refused("ssh-tunnels-tritonserver", **with_id, **at)
    assert refused == "tunnels_address: this machine has no 10.99.99.99."


async def test_a_dead_model_is_restarted(machine: Machine, instance: int) -> None:
    """The supervisor that is started with Triton sees what Triton's readiness hides."""
    machine.make("deploy-models-tritonserver", CONTRACT_ID=instance)
    machine.make("run-tritonserver", CONTRACT_ID=instance)
    supervisor = machine.server()
    assert supervisor is not None
    async with TritonClient(f"127.0.0.1:{machine.definition['triton_grpc_port']}") as client:

        async def answers() -> bool:
            with contextlib.suppress(GenerationError):
                return bool([one async for one in client.generate("scripted", "a", {})])
            return False

        await until(answers, DEADLINE_SECONDS)
        before = {child.pid for child in supervisor.children(recursive=True)}
        with contextlib.suppress(GenerationError):
            async for _ in client.generate("scripted", "{{crash_at=0}}", {}):
                pass
        await until(answers, DEADLINE_SECONDS)
    assert machine.server() == supervisor
    assert not before & {child.pid for child in supervisor.children(recursive=True)}
    machine.make("kill-tritonserver", CONTRACT_ID=instance)
    assert machine.server() is None


def test_every_key_reaches_vast_and_no_secret_is_in_a_process_s_arguments(machine: Machine) -> None:
    onstart = 'echo "it\'s" $(id) `id` \\\n&& echo ../ -oProxyCommand=x $HOME %d'
    created = machine.make(
        "create-instance", INSTANCE_ID=FAIR, DISK=55.5, LABEL="my label", JUPYTER="true",
        JUPYTER_DIR="/opt/notes", JUPYTER_LAB="true", FORCE="true", LANG_UTF8="false",
        TAG="24.07-vllm-python-py3", RETRY=2, ONSTART=onstart,
    )  # fmt: skip
    assert int(created) in machine.api.rows
    body = machine.api.created[-1]
    assert {name: body[name] for name in body if body[name] not in (None, "")} == {
        "client_id": "me",
        "image": "nvcr.io/nvidia/tritonserver:24.07-vllm-python-py3",
        "disk": 55.5,
        "label": "my label",
        "runtype": "jupyter_direc ssh_direc ssh_proxy",
        "use_jupyter_lab": True,
        "jupyter_dir": "/opt/notes",
        "lang_utf8": False,
        "python_utf8": True,
        "force": True,
        "cancel_unavail": True,
        "env": {"TZ": "UTC", "HF_TOKEN": HF_TOKEN, "-p 8080:8080": "1"},
        "onstart": onstart,
    }
    assert machine.api.searched[-1]["allocated_storage"] == 55.5
    machine.make("create-instance", INSTANCE_ID=FAIR, MAX_PRICE="", JUPYTER="", DIRECT="false")
    body = machine.api.created[-1]
    assert body["runtype"] == "ssh_proxy"
    assert body["onstart"] == machine.definition["onstart"].strip()
    assert (body["disk"], body["label"]) == (40, "tritonserver")
    assert any("nvidia_triton create-instance" in line for line in machine.api.arguments)
    assert not any(HF_TOKEN in line or API_KEY in line for line in machine.api.arguments)


def test_models_appear_whole_or_not_at_all(machine: Machine, instance: int) -> None:
    with_id: dict[str, Any] = {"CONTRACT_ID": instance}
    live = machine.folder / "opt" / "models" / "scripted"
    models = machine.folder / "edited"
    shutil.copytree(machine.folder / "models", models)
    script = models / "scripted" / "1" / "script.py"

    def deploy() -> str:
        ended = machine.run("deploy-models-tritonserver", MODELS=models, **with_id)
        return ended.stderr if ended.returncode else "deployed: " + ended.stderr

    assert deploy().startswith("deployed")
    first = live.resolve()
    assert "are those here" in deploy()
    assert live.resolve() == first

    # An upload that fails in the middle leaves what was there, whole.
    script.write_text(script.read_text() + "\n# changed\n")
    (models / "scripted" / "1" / "zz_weights").symlink_to("nowhere")
    assert "rsync: " in deploy()
    assert live.resolve() == first
    assert "# changed" not in (live / "1" / "script.py").read_text()

    (models / "scripted" / "1" / "zz_weights").unlink()
    assert "scripted is in place" in deploy()
    assert live.resolve() != first
    assert "# changed" in (live / "1" / "script.py").read_text()
    # Not uploaded again: the same file.
    assert (live / "config.pbtxt").stat().st_ino == (first / "config.pbtxt").stat().st_ino

    # Files from another source are replaced, too.
    whole = live.resolve()
    live.unlink()
    shutil.copytree(whole, live)
    (live / "1" / "stray").touch()
    assert "scripted is in place" in deploy()
    assert live.is_symlink()
    assert not (live / "1" / "stray").exists()


def test_a_model_that_cannot_be_loaded_is_told_and_the_way_on(machine: Machine) -> None:
    models = machine.folder / "broken"
    (models / "bad" / "1").mkdir(parents=True)
    (models / "bad" / "config.pbtxt").write_text('backend: "nothing"')
    (models / "notes").mkdir()
    ended = machine.run("bring-up", MODELS=models)
    (contract,) = machine.api.rows
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert HF_TOKEN not in ended.stderr
    printed = ended.stderr.splitlines()
    assert printed[:2] == [
        "Left out, without a config.pbtxt: notes",
        f"Rented 1 x RTX 4090 for $0.210 an hour as instance {contract}: CONTRACT_ID={contract}",
    ]
    assert printed[2].startswith(f"Instance {contract} is loading (Pulling), ")
    assert re.search(r"^Triton cannot load bad: .*nothing", ended.stderr, re.MULTILINE)
    assert f"make destroy-instance CONTRACT_ID={contract} ends it." in ended.stderr
    machine.make("destroy-instance", CONTRACT_ID=contract, CONFIRM=1)
    assert not machine.api.rows
    (machine.folder / "opt" / "models" / "bad").unlink()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("ssh-instance", {}, "CONTRACT_ID is missing: make show-instances lists yours."),
        ("run-tritonserver", {"CONTRACT_ID": 5}, "You have no instance 5: make show-instances"),
        ("create-instance", {}, "INSTANCE_ID is missing: make search-instance lists offers."),
        ("create-instance", {"INSTANCE_ID": 5}, "There is no offer 5 (any more): make search-"),
        ("create-instance", {"INSTANCE_ID": DEAR}, "Offer 7004 costs $1.900 an hour, more than"),
        ("create-instance", {"INSTANCE_ID": TAKEN}, "Offer 7003 was not rented: Vast.ai: not avail"),
        ("bring-up", {"INSTANCE_ID": DEAR}, "Offer 7004 costs $1.900 an hour, more than"),
        ("bring-up", {"MAX_PRICE": 0.1}, "There is no such offer now: "),
        ("bring-up", {"MAX_PRICE": ""}, "INSTANCE_ID is missing: without MAX_PRICE"),
        ("bring-up", {"MODELS": "/nowhere"}, "models: '/nowhere' is no folder."),
        ("bring-up", {"INSTANCE_ID": ""}, "INSTANCE_ID is given but empty: make search-instance"),
        ("bring-up", {"CONTRACT_ID": ""}, "CONTRACT_ID is given but empty: make show-instances"),
        ("bring-up", {"INSTANCE_ID": FAIR, "CONTRACT_ID": ""}, "CONTRACT_ID is given but empty: "),
        ("bring-up", {"env": {"CONTRACT_ID": "5"}}, "CONTRACT_ID is exported, which does not count"),
        ("bring-up", {"env": {"INSTANCE_ID": "5"}}, "INSTANCE_ID is exported, which does not count"),
        ("destroy-instance", {"env": {"CONTRACT_ID": "5"}}, "CONTRACT_ID is missing: "),
        ("bring-up", {"MAXPRICE": 1},
         "MAXPRICE is no variable of this Makefile: did you mean MAX_PRICE?"),
        ("create-instance", {"INSTANCE_ID": FAIR, "max_price": 0.1},
         "max_price is no variable of this Makefile: did you mean MAX_PRICE?"),
        ("bring-up", {"colour": "$(shell false)"},
         "colour is no variable of this Makefile: make help lists them."),
        ("bring-up", {"keys": "MAXPRICE"}, "keys is no variable of this Makefile: "),
        ("bring-up", {"name": "mine"}, "name is no variable of this Makefile: "),
        ("bring-up", {"DEFINITION": ""}, "DEFINITION is empty: give a path, or leave it out."),
        # Before the network is asked for anything.
        ("check-logs-tritonserver", {"CONTRACT_ID": 5, "LOG_LINES": "x"},
         "LOG_LINES: 'x' is not a number: "),
        ("deploy-tritonserver", {"CONTRACT_ID": 5, "LOG_LINES": "x"},
         "LOG_LINES: 'x' is not a number: "),
        ("show-instances", {"env": {"VAST_API_KEY": "unset", "VAST_URL": "http://127.0.0.1:9"}},
         f"There is no API key: export VAST_API_KEY=..., or `{VAST}/.venv/bin/vastai set api-key"),
        ("show-instances", {"env": {"VAST_API_KEY": "wrong"}}, "Vast.ai refused the API key, or "),
        ("show-instances", {"env": {"VAST_URL": "http://127.0.0.1:9"}, "RETRY": 1},
         "Vast.ai cannot be reached (ConnectionError): check the network."),
        ("search-instance", {"DISK": "much"}, "disk: 'much' is not a number from 1 to 100000."),
        ("bring-up", {"PRIVATE_SSH_KEY": "none"}, "PRIVATE_SSH_KEY: there is no file "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(
    machine: Machine, target: str, options: dict[str, Any], message: str
) -> None:
    assert machine.refused(target, **options).startswith(message)
    assert not machine.api.rows


def test_what_is_wrong_with_an_instance_is_one_line(machine: Machine, instance: int) -> None:
    with_id: dict[str, Any] = {"CONTRACT_ID": instance}
    other = {"PRIVATE_SSH_KEY": machine.folder / "other"}
    refused = machine.refused("run-tritonserver", **with_id, **other)
    assert refused.startswith(f"Instance {instance} refuses your ssh key: ")
    refused = machine.refused("deploy-models-tritonserver", **with_id, **other)
    assert refused.startswith(f"Instance {instance} refuses your ssh key: ")
    with (machine.folder / "state" / str(instance) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = machine.refused("deploy-models-tritonserver", **with_id)
        assert refused.startswith(f"Another upload to instance {instance} is going on")
    refused = machine.refused("run-tritonserver", TRITONSERVER="nothing_here", **with_id)
    assert refused.startswith(f"Instance {instance}: there is no nothing_here")
    refused = machine.refused("run-tritonserver", TRITONSERVER="false", **with_id)
    assert refused.startswith(f"Instance {instance}: tritonserver ended at once")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for target in ("ssh-tunnels-tritonserver", "bring-up"):
            refused = machine.refused(target, HTTP_PORT=port, **with_id)
            assert refused.startswith(f"Port {port} of 127.0.0.1 is taken: ")
    machine.api.rows[instance].update(actual_status="loading", status_msg="Pulling 3 of 9")
    assert machine.refused("ssh-instance", **with_id) == (
        f"Instance {instance} is loading (Pulling 3 of 9): not yet, try again "
        "(make show-instances)."
    )
    machine.api.rows[instance].update(actual_status="running", public_ipaddr="-oProxyCommand=x")
    assert "has the ssh address '-oProxyCommand=x'" in machine.refused("ssh-instance", **with_id)
    machine.api.rows[instance].update(public_ipaddr="127.0.0.1")
    machine.api.rows[instance]["ports"]["22/tcp"][0]["HostPort"] = str(free_port())
    assert machine.refused("ssh-instance", **with_id).startswith("ssh: connect to host 127.0.0.1")
    assert machine.refused("run-tritonserver", **with_id).startswith(
        f"Instance {instance} does not answer: "
    )


def test_a_missing_cli_is_one_line(machine: Machine) -> None:
    bare = machine.folder / "bare" / "nvidia_triton"
    bare.mkdir(parents=True)
    shutil.copy(VAST / "Makefile", bare)
    ended = subprocess.run(
        ["make", "-s", "-C", bare, "bring-up"],
        env=machine.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert "The vastai CLI is not installed: make .venv (in nvidia_triton)" in ended.stderr


@pytest.fixture
def unmarked(machine: Machine) -> Iterator[Callable[[str], str]]:
    """Puts a file's name for MARK; at the end nothing may have made it, here or elsewhere."""
    mark = machine.folder / "mark"
    yield lambda text: text.replace("MARK", str(mark))
    assert not mark.exists()
    strays = [path for folder in (ROOT, VAST) for path in folder.glob("*ProxyCommand*")]
    assert not strays


def test_nothing_that_make_is_told_is_run(
    machine: Machine, instance: int, unmarked: Callable[[str], str]
) -> None:
    nasty = unmarked(NASTY)
    keys = [name.upper() for name in machine.definition if name not in ("onstart", "models")]
    for name in (*keys, "INSTANCE_ID", "CONTRACT_ID", "PRIVATE_SSH_KEY"):
        target = "create-instance" if name == "INSTANCE_ID" else "run-tritonserver"
        options: dict[str, Any] = {"CONTRACT_ID": instance, name: nasty}
        ended = machine.run(target, **options)
        assert ended.returncode != 0, name
        assert ended.stderr.lower().startswith(name.lower()), ended.stderr
    # Texts that may be anything end where they belong, as they are.
    state = str(machine.folder / nasty.replace("/", "_")[:200])
    free: list[dict[str, Any]] = [
        {"DEFINITION": nasty},
        {"MODELS": nasty},
        {"STATE_DIR": state, "CONFIRM": nasty, "LOG_LINES": nasty},
    ]
    for given in free:
        machine.run("deploy-models-tritonserver", CONTRACT_ID=instance, **given)
    assert (Path(state) / str(instance) / "ssh_config").exists()


def test_a_folder_of_models_may_have_any_name(
    machine: Machine, instance: int, unmarked: Callable[[str], str]
) -> None:
    folder = machine.folder / unmarked("-oProxyCommand=x;$(touch MARK)'\n\":%d").replace("/", "_")
    shutil.copytree(machine.folder / "models", folder)
    (folder / "scripted" / "1" / "new $(touch x)\n'name").touch()
    printed = machine.run("deploy-models-tritonserver", CONTRACT_ID=instance, MODELS=folder)
    assert "scripted is in place" in printed.stderr
    live = machine.folder / "opt" / "models" / "scripted" / "1"
    assert (live / "new $(touch x)\n'name").exists()
    (folder / "-x $(touch y)").mkdir()
    (folder / "-x $(touch y)" / "config.pbtxt").touch()
    assert "is no name for a model" in machine.refused(
        "deploy-models-tritonserver", CONTRACT_ID=instance, MODELS=folder
    )
