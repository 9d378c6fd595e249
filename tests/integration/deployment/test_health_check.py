"""`triton/health check` on a real tritonserver: what readiness hides, and what only looks like illness."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.cli.up.processes import free_port
from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_access import KEY, RESTRICTED
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import GenerationError
from tests.conftest import ROOT, SCRIPTED, TRITON_SECRET, run_triton
from tests.integration.support import until

HEALTH = [sys.executable, "-I", str(ROOT / "triton" / "health")]
# Answers one request after the other, each in 0.3 s.
SLOW = """
        for request in requests:
            time.sleep(0.3)
            self.answer(request.get_response_sender())
"""
# Between the prompts "work" and "rest" all requests but "no" wait; tokens are counted until "stall".
BUSY = """
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
            if prompt == b"work":
                self.waiting, self.is_working = [], True
                threading.Thread(target=self.work).start()
            if prompt == b"stall":
                self.is_working = False
            if self.waiting is not None and prompt not in (b"no", b"stall"):
                self.waiting.append(request.get_response_sender())
            else:
                self.answer(request.get_response_sender())
            if prompt == b"rest":
                for sender in self.waiting:
                    self.answer(sender)
                self.waiting = None
"""
MODEL = """
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.waiting, self.is_working = None, False
        family = pb_utils.MetricFamily(
            name="vllm:generation_tokens_total", description="d", kind=pb_utils.MetricFamily.COUNTER
        )
        self.family = family
        if args["model_name"] == "busy":
            self.counter = family.Metric(labels={"model": "busy", "version": "1"})

    def work(self):
        while self.is_working:
            self.counter.increment(1)
            time.sleep(0.1)

    def answer(self, sender):
        text = pb_utils.Tensor("text_output", np.array([b"x"], dtype=np.object_))
        sender.send(pb_utils.InferenceResponse([text]), flags=1)

    def execute(self, requests):
"""


class WithHttp(EmbeddedTriton):
    """A server with HTTP, as under a supervisor: its health check is HTTP's only client."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ports["http"] = 0
        self.secret = TRITON_SECRET

    def _options(self) -> list[str]:
        options = [one for one in super()._options() if one != "--allow-http=false"]
        return [*options, f"--http-restricted-api={RESTRICTED}:{KEY}={self.secret}"]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A server with the models `slow` and `busy`."""
    folder = tmp_path_factory.mktemp("crowded")
    config = (SCRIPTED["scripted"] / "config.pbtxt").read_text()
    models = {"slow": folder / "slow", "busy": folder / "busy"}
    for path, execute in zip(models.values(), (SLOW, BUSY), strict=True):
        (path / "1").mkdir(parents=True)
        (path / "config.pbtxt").write_text(config)
        (path / "1" / "model.py").write_text(MODEL + execute)
    with run_triton(WithHttp, folder, models) as server:
        yield server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedTriton]:
    """A server of the test's own."""
    triton = WithHttp(ROOT / ".venv-triton", tmp_path / "work", SCRIPTED, tmp_path / "triton.log")
    await triton.start()
    try:
        yield triton
    finally:
        await triton.stop()


async def check(triton: EmbeddedTriton, *options: str) -> tuple[int, str]:
    """Exit status and only line of `check`."""
    addresses = ["--http", triton.address("http"), "--metrics", triton.address("metrics")]
    return await verdict(*addresses, *options)


async def verdict(*options: str) -> tuple[int, str]:
    ended = await asyncio.to_thread(
        subprocess.run, [*HEALTH, "check", *options], env={"LLM_TRITON_SECRET": TRITON_SECRET},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.stderr == ""
    (line,) = ended.stdout.splitlines()
    return ended.returncode, line


def process_of(triton: EmbeddedTriton) -> psutil.Process:
    """The process that listens on the server's port."""
    port = int(triton.address("http").rpartition(":")[2])
    (pid,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:] == (port,)
    }
    assert pid is not None
    return psutil.Process(pid)


async def generate(client: TritonClient, model: str, prompt: str) -> None:
    """A generation to its end, which may be the model's."""
    with contextlib.suppress(GenerationError):
        async for _ in client.generate(model, prompt, {"max_tokens": 1000}):
            pass


@contextlib.asynccontextmanager
async def running(triton: EmbeddedTriton, prompt: str) -> AsyncIterator[None]:
    """A request that the scripted model has meanwhile; at the end its server is killed."""
    async with triton.client() as client:
        task = asyncio.create_task(generate(client, "scripted", prompt))
        try:
            yield
        finally:
            # An orderly end would wait for what never answers.
            process_of(triton).kill()
            await task


async def until_found(triton: EmbeddedTriton, fault: str, *options: str) -> None:
    async def is_found() -> bool:
        return await check(triton, *options) == (1, fault)

    await until(is_found)


@pytest.mark.trial
async def test_a_dead_process_behind_a_ready_model(server: EmbeddedTriton) -> None:
    assert await check(server) == (0, "healthy: 1 models answer")
    async with running(server, "{{crash_at=1}}"):
        await until_found(server, "model scripted: Stub process 'scripted_0_0' is not healthy.")
        async with server.client() as client:
            assert [entry.ready for entry in await client.index()] == [True]


@pytest.mark.trial
async def test_a_model_that_hangs(server: EmbeddedTriton) -> None:
    async with running(server, "{{delay_ms=10 hang_at=3}}"):
        fault = "model scripted: no token within 1 s, and no progress of other requests"
        await until_found(server, fault, "--timeout", "1")


@pytest.mark.trial
async def test_a_full_model_is_healthy(crowded: EmbeddedTriton) -> None:
    async with crowded.client() as client:
        full = [asyncio.create_task(generate(client, "slow", "a")) for _ in range(30)]
        await until(lambda: has_begun(client, "slow"))
        found = await check(crowded, "--timeout", "1")
        assert not all(task.done() for task in full), "it was not full"
        await asyncio.gather(*full)
    assert found == (0, "healthy: 2 models answer")


async def has_begun(client: TritonClient, model: str) -> bool:
    return await client.request_count(model) > 1  # the first one is its start's


@pytest.mark.trial
async def test_an_engine_that_generates_is_healthy_and_one_that_only_refuses_is_not(
    crowded: EmbeddedTriton,
) -> None:
    """Triton counts the refusals of a decoupled model as successes; tokens are the better proof."""

    async def refuse() -> None:
        while not has_ended.is_set():
            await generate(client, "busy", "no")

    async with crowded.client() as client:
        work = asyncio.create_task(generate(client, "busy", "work"))
        await until(lambda: counts_tokens(crowded))
        generating = await check(crowded, "--timeout", "1")
        await generate(client, "busy", "stall")
        has_ended = asyncio.Event()
        refusing = asyncio.create_task(refuse())
        stalled = await check(crowded, "--timeout", "1")
        has_ended.set()
        await asyncio.gather(refusing, generate(client, "busy", "rest"), work)
    assert generating == (0, "healthy: 2 models answer")
    assert stalled == (1, "model busy: no token within 1 s, and no progress of other requests")


async def counts_tokens(triton: EmbeddedTriton) -> bool:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{triton.address('metrics')}/metrics")).text
    return 'vllm:generation_tokens_total{model="busy"' in text


@pytest.mark.trial
async def test_a_refused_probe_is_an_answer(tmp_path: Path) -> None:
    refusing = tmp_path / "refusing"
    (refusing / "1").mkdir(parents=True)
    (refusing / "config.pbtxt").write_text((SCRIPTED["scripted"] / "config.pbtxt").read_text())
    (refusing / "1" / "model.py").write_text(
        MODEL
        + """
        for request in requests:
            error = pb_utils.TritonError("INVALID_ARG: no", pb_utils.TritonError.INVALID_ARG)
            request.get_response_sender().send(pb_utils.InferenceResponse(error=error), flags=1)
"""
    )
    triton = WithHttp(
        ROOT / ".venv-triton", tmp_path / "work", {"refusing": refusing}, tmp_path / "log"
    )
    await triton.start()
    try:
        assert await check(triton) == (0, "healthy: 1 models answer")
    finally:
        await triton.stop()


@pytest.mark.trial
async def test_no_ready_model_and_a_frozen_server(server: EmbeddedTriton) -> None:
    async with server.client() as client:
        await client.unload("scripted")

        async def is_unloaded() -> bool:
            return not any(entry.ready for entry in await client.index())

        await until(is_unloaded)
    assert await check(server) == (1, "0 models are ready, 1 are required")
    assert await check(server, "--min-ready", "0") == (0, "healthy: 0 models answer")
    process_of(server).suspend()
    try:
        assert await check(server, "--timeout", "1") == (
            1, f"{server.address('http')} did not answer within 1 s",
        )  # fmt: skip
    finally:
        process_of(server).resume()


async def test_what_is_no_triton() -> None:
    port = free_port()
    status, line = await verdict("--http", f"127.0.0.1:{port}")
    assert (status, "does not answer" in line) == (1, True)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        body = json.dumps({"error": "what"})
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        status, line = await verdict("--http", f"127.0.0.1:{port}")
    assert (status, "returned no repository index" in line) == (1, True)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:x", "localhost:0"])
def test_wrong_addresses_are_refused(address: str) -> None:
    ended = subprocess.run(
        [*HEALTH, "check", "--http", address], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert f"argument --http: {address!r} is not HOST:PORT" in ended.stderr


USE = """
import sys
sys.path.insert(0, sys.argv[1])
from check import Server, check
server, seen = Server(*sys.argv[2:4], 10.0, sys.argv[4]), {}
for _ in sys.stdin:  # a check for each line
    assert not check(server, 1, seen).problems
    print(server.ask("GET", "/v2/models/scripted/stats")["model_stats"][0]["inference_count"], flush=True)
"""


@pytest.mark.trial
async def test_an_unused_model_is_probed_once(server: EmbeddedTriton) -> None:
    """As `--only-used` has it: probes are requests, and would keep an idle launch alive."""
    addresses = [server.address("http"), server.address("metrics"), server.secret]
    checker = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", USE, str(ROOT / "triton" / "health"), *addresses,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip

    async def count() -> int:
        assert checker.stdin is not None
        assert checker.stdout is not None
        checker.stdin.write(b"\n")
        return int(await checker.stdout.readline())

    async with asyncio.timeout(60):
        first, second = await count(), await count()
        async with server.client() as client:
            await generate(client, "scripted", "{{text=one}}")
        third, fourth = await count(), await count()
        checker.terminate()
        await checker.wait()
    assert second == first
    assert third == second + 2  # the request and a probe
    assert fourth == third
