"""A real tritonserver under our own supervision, from the wheels in `.venv-triton`.

Its own readiness does not see that a model's process is gone, so health is a generation of one
token per model.
"""

import asyncio
import hashlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from os import environ
from pathlib import Path

from app.embedded import processes
from app.embedded.processes import StartError
from app.errors import NotFoundError, TritonError, TritonUnavailableError
from app.triton_client import GenerationError, RefusedError, TritonClient

HOST = "127.0.0.1"
SERVER_SECONDS = 60.0
PROBE_INTERVAL = 5.0
# A full engine answers when one of its running requests ends. A late answer is no sign of death:
# a dead process answers at once, with an error.
PROBE_SECONDS = 60.0
# So many control calls in a row without an answer (10 s each) mean a server that hangs.
MAX_SILENCE = 3
EXIT_SECONDS = 15
_TRITON = Path(__file__).parents[2] / "triton"


class EmbeddedTriton:
    """One server with its models loaded; its ports stay the same over restarts."""

    name = "Triton"

    def __init__(self, venv: Path, work: Path, models: Mapping[str, Path], log_file: Path) -> None:
        """`models` maps names to directories as of a Triton model repository."""
        self.log_file = log_file
        self.models = dict(models)
        self._venv = venv.absolute()
        self._work = work.absolute()
        self._repository = self._work / "models"
        self._ports = {"http": 0, "grpc": 0, "metrics": 0}
        # Names our regions, so that those a killed server left can be told from others'.
        self._region = f"llm_{hashlib.sha256(bytes(self._work)).hexdigest()[:12]}_"
        self._process: subprocess.Popen[bytes] | None = None

    def address(self, protocol: str) -> str:
        """`host:port` of "http", "grpc" or "metrics"."""
        return f"{HOST}:{self._ports[protocol]}"

    @property
    def environment(self) -> dict[str, str]:
        """The service's settings that name this server; ports are known from here on."""
        self._choose_ports()
        return {
            "TRITON_HTTP_SERVICE": self.address("http"),
            "TRITON_GRPC_SERVICE": self.address("grpc"),
            "TRITON_METRICS_SERVICE": self.address("metrics"),
            "LLM_MODEL_REPOSITORY": str(self._repository),
        }

    async def start(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Bring server and models up, whatever part of them is down; raises `StartError`."""
        try:
            await self._mend(tell)
        except (TritonError, TritonUnavailableError) as error:
            # A server whose model cannot be unloaded or loaded gets one fresh start.
            first = str(error)
        else:
            return
        tell("starting again")
        await self.stop()
        try:
            await self._mend(tell)
        except (TritonError, TritonUnavailableError) as error:
            reason = " ".join((str(error) or first).split())[:400]
            raise StartError(f"Triton: {reason} (log: {self.log_file})") from error

    async def wait(self) -> str:
        """Return when the server has ended or a model does not answer, with the reason."""
        if self._process is None:
            return "is not running"
        ended = asyncio.create_task(processes.wait_exit(self._process))
        silence = 0
        try:
            async with TritonClient(self.address("grpc")) as client:
                while True:
                    await asyncio.wait({ended}, timeout=PROBE_INTERVAL)
                    if ended.done():
                        return processes.describe_status(ended.result())
                    try:
                        reason = await self._ailment(client)
                    except TritonUnavailableError:
                        silence += 1
                        reason = "does not answer" if silence >= MAX_SILENCE else ""
                    else:
                        silence = 0
                    if reason and not ended.done():
                        return reason
        finally:
            ended.cancel()

    async def stop(self) -> None:
        """End the server and everything it started, and remove its shared memory."""
        if self._process is not None:
            await processes.stop(self._process, signal.SIGTERM, EXIT_SECONDS + 5)
            self._process = None
        _remove_regions(self._region)

    async def probe(self, client: TritonClient, model: str) -> str:
        """Generate one token; what is wrong with the model, or "" if nothing seems to be."""
        parameters = {"max_tokens": 1, "temperature": 0}
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                async for _ in client.generate(model, "a", parameters):
                    pass
        except (RefusedError, TimeoutError):
            return ""
        except GenerationError as error:
            return f"{model} fails: {error}"
        return ""

    async def _ailment(self, client: TritonClient) -> str:
        ready = {entry.name for entry in await client.index() if entry.ready}
        for model in self.models:
            if model not in ready:
                return f"{model} is not loaded"
            if reason := await self.probe(client, model):
                return reason
        return ""

    async def _mend(self, tell: Callable[[str], None]) -> None:
        if self._process is None or self._process.poll() is not None:
            await self.stop()
            await self._start_server(tell)
        async with TritonClient(self.address("grpc")) as client:
            index = {entry.name: entry for entry in await client.index()}
            for model in self.models:
                if model in index and index[model].ready:
                    if not await self.probe(client, model):
                        continue
                    tell(f"unloading {model}")
                    await client.unload(model)
                tell(f"loading {model}")
                try:
                    await client.load(model)
                except NotFoundError as error:
                    raise TritonError(str(error)) from error
                if reason := await self.probe(client, model):
                    raise TritonError(reason)

    async def _start_server(self, tell: Callable[[str], None]) -> None:
        tell("starting the server")
        await self._lay_out()
        self._choose_ports()
        log_start = processes.log_size(self.log_file)
        self._process = self._spawn(["serve.sh", self._venv, self._work, *self._options()])
        deadline = time.monotonic() + SERVER_SECONDS
        async with TritonClient(self.address("grpc")) as client:
            while not await client.is_live():
                if self._process.poll() is not None:
                    last = processes.last_lines(self.log_file, log_start, 1)
                    raise StartError(f"Triton ended at its start: {last} (log: {self.log_file})")
                if time.monotonic() > deadline:
                    raise StartError(f"Triton did not start: see {self.log_file}")
                await asyncio.sleep(0.1)

    async def _lay_out(self) -> None:
        """Make the server's directory and, in it, the repository: one link per model."""
        shutil.rmtree(self._repository, ignore_errors=True)
        self._repository.mkdir(parents=True)
        for name, directory in self.models.items():
            (self._repository / name).symlink_to(directory.absolute())
        log_start = processes.log_size(self.log_file)
        process = self._spawn(["layout.sh", self._venv, _TRITON / "backends", self._work])
        if await processes.wait_exit(process) != 0:
            raise StartError(processes.last_lines(self.log_file, log_start, 1))

    def _spawn(self, script: list[str | Path]) -> subprocess.Popen[bytes]:
        name, *arguments = script
        return processes.spawn(
            ["sh", _TRITON / name, *arguments], log_file=self.log_file, env=environ
        )

    def _options(self) -> list[str]:
        options = [
            f"--model-repository={self._repository}",
            "--model-control-mode=explicit",
            f"--exit-timeout-secs={EXIT_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={self._region}",
            f"--backend-config=vllm,shm-region-prefix-name={self._region}",
        ]
        for protocol, port in self._ports.items():
            options += [f"--{protocol}-address={HOST}", f"--{protocol}-port={port}"]
        return options

    def _choose_ports(self) -> None:
        for protocol, port in self._ports.items():
            self._ports[protocol] = port or processes.free_port()


def _remove_regions(prefix: str) -> None:
    for region in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108 - Triton's choice
        region.unlink(missing_ok=True)
