"""`triton/health run`: a real tritonserver that crashes, freezes and is stopped; and its supervisor."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.cli.up.processes import free_port
from app.core.errors import TritonError, TritonUnavailableError
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import GenerationError
from tests.conftest import ROOT, SCRIPTED, TRITON_SECRET, TRITON_VENV
from tests.integration.deployment.test_health_check import HEALTH
from tests.integration.support import until

MARK = "HEALTH_TEST"  # in the environment of everything that a test started
TRITON = ROOT / "triton"
SECONDS = 60.0


class Supervised:
    """A supervisor process with its command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("http", "grpc", "metrics")}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *options: str, command: list[str], secret: str = "") -> None:
        addresses = [f"--{name}=127.0.0.1:{self.ports[name]}" for name in ("http", "metrics")]
        fast = ["--interval=0.3", "--timeout=2", "--failures=2", "--crash-seconds=0.5"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*HEALTH, "run", *addresses, *fast, *options, "--", *command],
                stdout=log, stderr=log, env=os.environ | {MARK: str(self.folder), "LLM_TRITON_SECRET": secret},
            )  # fmt: skip

    def start_triton(self, *options: str, before: str = "") -> None:
        """Supervise a tritonserver with the scripted model; a shell runs `before` first."""
        work = self.folder / "work"
        layout: list[str | Path] = [
            "sh",
            TRITON / "layout.sh",
            TRITON_VENV,
            TRITON / "backends",
            work,
        ]
        subprocess.run(layout, check=True)
        (work / "models").mkdir()
        (work / "models" / "scripted").symlink_to(SCRIPTED["scripted"])
        words = ["sh", str(TRITON / "serve.sh"), str(TRITON_VENV), str(work)]
        words += [f"--model-repository={work / 'models'}", "--model-control-mode=explicit"]
        words += ["--load-model=scripted"]
        for name, port in self.ports.items():
            words += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
        self.start(
            *options, command=["sh", "-c", f'{before}exec "$@"', "sh", *words], secret=TRITON_SECRET
        )

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(SECONDS)

    @property
    def lines(self) -> list[str]:
        """The supervisor's own log lines, without times."""
        text = (self.folder / "log").read_text(errors="replace")
        return [
            line.split("supervisor: ")[1] for line in text.splitlines() if "supervisor: " in line
        ]

    def family(self) -> list[psutil.Process]:
        """Everything that the command started, wherever its parents are, and the supervisor."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == str(self.folder)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # it has ended, or is the kernel's
                pass
        return found

    def find(self, name: str) -> psutil.Process:
        (found,) = [process for process in self.family() if process.name().startswith(name)]
        return found

    async def generate(self, prompt: str = "{{text=one two}}", seconds: float = 30.0) -> str:
        """A generation; empty if the model cannot be reached, or does not answer in time."""
        async with TritonClient(f"127.0.0.1:{self.ports['grpc']}", TRITON_SECRET) as client:
            try:
                async with asyncio.timeout(seconds):
                    deltas = client.generate("scripted", prompt, {"max_tokens": 2})
                    return "".join([delta.text async for delta in deltas])
            except (GenerationError, TritonError, TritonUnavailableError, TimeoutError):
                return ""

    async def until_healthy(self, times: int) -> None:
        """Wait until the supervisor has found the server healthy so often."""

        async def is_healthy() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.lines
            return sum(line.startswith("healthy") for line in self.lines) >= times

        await until(is_healthy, SECONDS)

    async def until_gone(self) -> None:
        async def is_gone() -> bool:
            return not self.family()

        await until(is_gone)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    for process in supervised.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    supervised.wait()


@pytest.mark.trial
async def test_a_dead_model_is_restarted_and_a_stop_ends_all(supervised: Supervised) -> None:
    supervised.start_triton()
    await supervised.until_healthy(1)
    first = supervised.find("tritonserver")
    assert await supervised.generate("{{crash_at=0}}", 2) == ""
    await supervised.until_healthy(2)
    assert (await supervised.generate()).split() == ["one", "two"]
    assert not first.is_running()
    restart = next(line for line in supervised.lines if line.startswith("restart"))
    assert restart == "restart in 1 s: model scripted: Stub process 'scripted_0_0' is not healthy."
    os.kill(supervised.pid, signal.SIGTERM)
    assert supervised.wait() == 0
    await supervised.until_gone()
    assert "successfully unloaded 'scripted'" in (supervised.folder / "log").read_text()


@pytest.mark.trial
async def test_a_frozen_server_is_restarted(supervised: Supervised) -> None:
    supervised.start_triton()
    await supervised.until_healthy(1)
    supervised.find("tritonserver").suspend()
    await supervised.until_healthy(2)
    assert (await supervised.generate()).split() == ["one", "two"]
    assert any("did not answer within 2 s" in line for line in supervised.lines)


@pytest.mark.parametrize("victim", ["supervisor", "keeper"])
@pytest.mark.trial
async def test_kill_9_leaves_nothing(supervised: Supervised, victim: str) -> None:
    """Neither the server nor a process in a session of its own, as vLLM's engine can be."""
    supervised.start_triton(before="setsid sleep 300 & ")
    await supervised.until_healthy(1)
    before = supervised.family()
    assert len(before) == 5  # supervisor, keeper, server, model, sleep
    if victim == "supervisor":
        os.kill(supervised.pid, signal.SIGKILL)
        await supervised.until_gone()
    else:
        (keeper,) = psutil.Process(supervised.pid).children()
        keeper.kill()
        await supervised.until_healthy(2)
        assert not any(process.is_running() for process in before if process.pid != supervised.pid)


@pytest.mark.trial
async def test_a_crash_that_does_not_end_is_killed(supervised: Supervised) -> None:
    """As Triton does when its heap broke; its liveness goes on answering."""
    script = "trap '' TERM; echo 'Signal (6) received.' >&2; while :; do sleep 0.1; done"
    supervised.start("--restarts=1", command=["sh", "-c", script])
    assert await asyncio.to_thread(supervised.wait) == 128 + signal.SIGKILL
    assert supervised.lines == [
        "restart in 1 s: it crashed and did not end",
        "not started again after 1 restarts: it crashed and did not end",
    ]
    await supervised.until_gone()


@pytest.mark.parametrize(
    "line",
    [
        "E1123 model.py:611] [vllm] Engine is not healthy and model will be unloaded: Traceback",
        "E1123 pb_stub.cc:1] the engine of model demo died: unloading it",
    ],
)
async def test_an_unloaded_model_is_a_dead_engine(supervised: Supervised, line: str) -> None:
    script = f"echo '{line}'; exec sleep 300"
    supervised.start("--restarts=0", command=["sh", "-c", script])
    assert await asyncio.to_thread(supervised.wait) != 0
    assert supervised.lines == [
        "not started again after 0 restarts: an engine died, and its model was unloaded"
    ]


@pytest.mark.trial
async def test_a_start_is_not_judged_unless_it_is_bounded(supervised: Supervised) -> None:
    supervised.start("--start-seconds=4", "--restarts=0", command=["sleep", "300"])
    started = time.monotonic()
    assert await asyncio.to_thread(supervised.wait) == 128 + signal.SIGKILL
    assert time.monotonic() - started > 4  # 2 failed checks in a row would have ended it before
    (line,) = supervised.lines
    assert "it was not healthy 4 s after its start (127.0.0.1:" in line


async def test_a_server_that_never_starts(supervised: Supervised) -> None:
    supervised.start("--must-start", command=["sh", "-c", "echo no >&2; exit 7"])
    assert await asyncio.to_thread(supervised.wait) == 7
    assert supervised.lines == [
        "not started again, as no model was ever ready: it ended with status 7"
    ]
    assert "no\n" in (supervised.folder / "log").read_text()
    supervised.start("--must-start", command=["/nonexistent/tritonserver"])
    assert await asyncio.to_thread(supervised.wait) == 127
    assert "cannot run /nonexistent/tritonserver: " in (supervised.folder / "log").read_text()


@pytest.mark.trial
async def test_pauses_grow_and_a_stop_ends_them(supervised: Supervised) -> None:
    supervised.start(command=["false"])

    async def has_restarted() -> bool:
        return len(supervised.lines) >= 3

    await until(has_restarted, SECONDS)
    assert [line.split(" s: ")[0] for line in supervised.lines] == [
        "restart in 1", "restart in 2", "restart in 4",
    ]  # fmt: skip
    os.kill(supervised.pid, signal.SIGTERM)
    assert await asyncio.to_thread(supervised.wait) == 0


async def test_a_server_that_ignores_its_stop(supervised: Supervised) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    supervised.start("--stop-seconds=0.5", command=["sh", "-c", script])

    async def is_up() -> bool:
        return "up\n" in (supervised.folder / "log").read_text()

    await until(is_up)
    os.kill(supervised.pid, signal.SIGINT)
    assert await asyncio.to_thread(supervised.wait) == 128 + signal.SIGKILL
    assert supervised.lines == ["killed, as it did not end within 0.5 s"]
    await supervised.until_gone()
