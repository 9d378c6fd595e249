"""The embedded Triton: a real server, its processes killed."""

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from app.cli.up import processes
from app.cli.up.processes import StartError
from app.cli.up.triton import CRASH, EmbeddedTriton
from app.inference.triton_client import TritonClient

pytestmark = pytest.mark.trial  # each starts Tritons of its own

ROOT = Path(__file__).resolve().parents[3]
MODELS = {"scripted": ROOT / "triton" / "models" / "scripted"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedTriton]:
    """A server of the test's own, which it may kill."""
    triton = EmbeddedTriton(ROOT / ".venv-triton", tmp_path / "work", MODELS, tmp_path / "log")
    await triton.start()
    try:
        yield triton
    finally:
        await triton.stop()


async def generate(triton: EmbeddedTriton, prompt: str = "{{text=one two}}") -> str:
    async with triton.client() as client:
        deltas = client.generate("scripted", prompt, {"max_tokens": 8})
        return "".join([delta.text async for delta in deltas])


def running(tmp_path: Path) -> list[psutil.Process]:
    """The processes that run in the test's work directory."""
    everyone = psutil.process_iter(["name", "cwd"])
    return [process for process in everyone if process.info["cwd"] == str(tmp_path / "work")]


def find(tmp_path: Path, name: str) -> psutil.Process:
    """The process called `name` that runs in the test's work directory."""
    for process in running(tmp_path):
        if process.info["name"].startswith(name):
            return process
    raise AssertionError(f"no {name} runs in {tmp_path}")


async def test_serves_its_models_and_leaves_nothing(server: EmbeddedTriton, tmp_path: Path) -> None:
    assert (await generate(server)).split() == ["one", "two"]
    family = [find(tmp_path, "tritonserver"), find(tmp_path, "triton_python_b")]
    listening = [c.laddr.ip for c in family[0].net_connections() if c.status == "LISTEN"]
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    await server.stop()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=30)
    assert not alive
    assert len(gone) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [("tritonserver", "SIGKILL"), ("triton_python_b", "has lost the process of a model")],
)
async def test_recovers_from_kill_9_on_the_same_ports(
    server: EmbeddedTriton, tmp_path: Path, name: str, reason: str
) -> None:
    address = server.address("grpc")
    down = asyncio.create_task(server.wait())
    # In flight while it happens: its stream must end, not hang.
    stuck = asyncio.create_task(generate(server, "{{chunks=8 delay_ms=60000}}"))
    await asyncio.sleep(0)
    family = find(tmp_path, "tritonserver").children(recursive=True)
    find(tmp_path, name).kill()
    async with asyncio.timeout(60):
        assert reason in await down
    await server.start()
    assert server.address("grpc") == address
    assert (await generate(server)).split() == ["one", "two"]
    async with asyncio.timeout(60):
        await asyncio.gather(stuck, return_exceptions=True)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=30)
    assert not alive, "outlived their server"


async def test_a_server_that_is_about_to_end_does_not_count_as_silent(
    server: EmbeddedTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are refused, and the model's process has ended, a second before the server's end."""
    refused = TritonClient(f"127.0.0.1:{processes.free_port()}", server.secret)
    monkeypatch.setattr(server, "client", lambda: refused)
    down = asyncio.create_task(server.wait())
    await asyncio.sleep(0)
    find(tmp_path, "triton_python_b").kill()
    await asyncio.sleep(1)  # calls are refused for so long, several probes
    find(tmp_path, "tritonserver").kill()
    async with asyncio.timeout(60):
        assert "SIGKILL" in await down


async def test_a_crash_is_logged(server: EmbeddedTriton, tmp_path: Path) -> None:
    find(tmp_path, "tritonserver").send_signal(signal.SIGABRT)
    async with asyncio.timeout(60):
        assert await server.wait() == "was ended by SIGABRT"
    assert CRASH.search((tmp_path / "log").read_text())


async def test_a_server_that_hangs_in_its_crash_is_ended(
    server: EmbeddedTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen here; a broken heap keeps its handler from ending, while control calls are answered."""
    monkeypatch.setattr("app.cli.up.triton.PROBE_INTERVAL", 0.2)
    monkeypatch.setattr("app.cli.up.triton.TRACE_SECONDS", 1.0)
    down = asyncio.create_task(server.wait())
    find(tmp_path, "tritonserver").send_signal(signal.SIGSTOP)
    with (tmp_path / "log").open("a") as log:
        log.write("double free or corruption (out)\nSignal (6) received.\n")
    async with asyncio.timeout(25):  # without the log, silence would show it after 30 s
        assert "crashed and did not end" in await down
    await server.start()
    assert (await generate(server)).split() == ["one", "two"]
    # The last server's log does not count for this one.
    down = asyncio.create_task(server.wait())
    ended, _ = await asyncio.wait([down], timeout=3)
    assert not ended
    down.cancel()


async def test_a_crash_that_nobody_waited_for_is_seen_at_the_next_start(
    server: EmbeddedTriton, tmp_path: Path
) -> None:
    crashed = find(tmp_path, "tritonserver")
    with (tmp_path / "log").open("a") as log:
        log.write("Signal (6) received.\n")
    assert server.is_down
    await server.start()
    assert not crashed.is_running()
    assert (await generate(server)).split() == ["one", "two"]


async def test_a_stub_that_hangs_dies_with_its_killed_server_and_no_other(
    server: EmbeddedTriton, tmp_path: Path
) -> None:
    """No process reaps here: only the kernel helps the stub."""
    other_path = tmp_path / "other"
    other = EmbeddedTriton(ROOT / ".venv-triton", other_path / "work", MODELS, other_path / "log")
    await other.start()
    killed, kept = find(tmp_path, "tritonserver"), find(other_path, "tritonserver")
    family = killed.children(recursive=True)
    others = kept.children(recursive=True)
    assert family
    assert others
    try:
        prompts = ["{{chunks=8 delay_ms=50 hang_at=2}}", "{{chunks=8 delay_ms=250}}"]
        streams = [asyncio.create_task(generate(server, prompt)) for prompt in prompts]
        ended, _ = await asyncio.wait(streams, timeout=4)
        assert not ended, "the stub does not hang"
        killed.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=30)
        assert not alive
        await asyncio.gather(*streams, return_exceptions=True)
        assert (await generate(other)).split() == ["one", "two"]
        assert kept.children(recursive=True) == others
    finally:
        processes.kill(family)
        await other.stop()


async def test_a_model_that_was_unloaded_is_loaded_again(server: EmbeddedTriton) -> None:
    down = asyncio.create_task(server.wait())
    async with server.client() as client:
        await client.unload("scripted")
    async with asyncio.timeout(60):
        assert await down == "has lost model scripted"
    await server.start()
    assert (await generate(server)).split() == ["one", "two"]


async def test_a_model_that_cannot_load_is_told_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "1").mkdir(parents=True)
    (broken / "config.pbtxt").write_text('backend: "nothing"')
    triton = EmbeddedTriton(
        ROOT / ".venv-triton", tmp_path / "work", {"broken": broken}, tmp_path / "log"
    )
    with pytest.raises(StartError, match=r"^Triton: .*broken.*log: ") as caught:
        await triton.start()
    assert "\n" not in str(caught.value)
    await triton.stop()


async def test_a_missing_environment_is_told_in_one_line(tmp_path: Path) -> None:
    triton = EmbeddedTriton(tmp_path / "venv", tmp_path / "work", MODELS, tmp_path / "log")
    with pytest.raises(StartError, match="not a usable virtual environment"):
        await triton.start()


async def test_ports_are_free_and_distinct() -> None:
    ports = {processes.free_port() for _ in range(20)}
    assert all(processes.is_port_free(port) for port in ports)
    assert len(ports) > 15


# Loads at the start for which FILE is there, and does ACTION at all others.
LOADER = """
import os, pathlib, signal, time
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config
    def initialize(self, args):
        if not pathlib.Path({file!r}).exists():
            {action}
    def execute(self, requests):
        return [None for _ in requests]
"""
LOADER_CONFIG = """backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@contextlib.asynccontextmanager
async def loading(
    tmp_path: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[EmbeddedTriton, list[str]]]:
    """A server whose only model does `action` while it loads, and what its start reports."""
    monkeypatch.setattr("app.cli.up.triton.LOAD_STALL_SECONDS", 3.0)
    monkeypatch.setattr("app.cli.up.triton.ACTIVITY_INTERVAL_SECONDS", 0.25)
    model = tmp_path / "loader"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(LOADER_CONFIG)
    (model / "1" / "model.py").write_text(
        LOADER.format(file=str(tmp_path / "loads"), action=action)
    )
    triton = EmbeddedTriton(
        ROOT / ".venv-triton", tmp_path / "work", {"loader": model}, tmp_path / "log"
    )

    async def probe(_client: TritonClient, _model: str) -> str:
        return ""  # the model generates nothing

    monkeypatch.setattr(triton, "probe", probe)
    try:
        yield triton, []
    finally:
        await triton.stop()
        # The process of a model whose server crashed: `up` reaps such orphans.
        stubs = psutil.process_iter(["exe"])
        processes.kill([one for one in stubs if str(tmp_path) in (one.info["exe"] or "")])


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "loading loader hung for 3 s"),
        ("os.kill(os.getppid(), signal.SIGKILL)", "Triton crashed while it loaded loader"),
    ],
    ids=["stopped", "crash"],
)
async def test_a_load_that_is_lost_is_begun_again(
    action: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(tmp_path, action, monkeypatch) as (triton, reported_at):

        def report(text: str) -> None:
            reported_at.append(text)
            if "start 2 of 3" in text:
                (tmp_path / "loads").touch()

        async with asyncio.timeout(90):
            await triton.start(report)
        assert not triton.is_down
        assert re.search(
            rf"loading loader \(\d+ s.*\) \(start 2 of 3: {reason}", "\n".join(reported_at)
        )
        assert not any("start 3 of 3" in text for text in reported_at)
        assert f"up: {reason}" in (tmp_path / "log").read_text()
        if "hung" in reason:
            assert any(
                re.search(r"\(\d+ s, [123] s without progress\)$", text) for text in reported_at
            )


async def test_a_load_that_always_hangs_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(tmp_path, "time.sleep(1000)", monkeypatch) as (triton, reported_at):
        with pytest.raises(
            StartError, match=r"^Triton: loading loader hung for 3 s, 3 times \(log: "
        ):
            async with asyncio.timeout(90):
                await triton.start(reported_at.append)
        assert triton.is_down
        # A killed process stays in the process table until its last thread has ended.
        _, alive = await asyncio.to_thread(psutil.wait_procs, running(tmp_path), timeout=30)
        assert not alive


async def test_a_long_load_that_works_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = "while time.monotonic() < end: time.sleep(0.1); sum(range(10**6))"
    action = f"end = time.monotonic() + 6\n            {work}"
    async with loading(tmp_path, action, monkeypatch) as (triton, reported_at):
        async with asyncio.timeout(90):
            await triton.start(reported_at.append)
        assert any(re.search(r"loading loader \([456] s", text) for text in reported_at)
        assert not any("start 2" in text for text in reported_at)
