"""A tritonserver as a supervised child, from the wheels in `.venv-triton`.

Triton reports itself as ready after a model's process died, so the health check is a generation of
one token per model.
"""

import asyncio
import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from os import environ
from pathlib import Path

import psutil

from app.cli.up import processes
from app.cli.up.activity import Activity
from app.cli.up.processes import StartError
from app.core.errors import NotFoundError, TritonError, TritonUnavailableError
from app.core.program import ROOT
from app.inference.triton_access import new_secret, restriction
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import GenerationError, RefusedError

HOST = "127.0.0.1"
SERVER_SECONDS = 60.0
PROBE_INTERVAL = 5.0
# A full engine answers when one of its running requests ends. A late response does not mean a dead
# process: that answers at once, with an error.
PROBE_SECONDS = 60.0
# So many control calls in a row without a response (10 s each) mean a server that hangs.
MAX_UNANSWERED_CALLS = 3
# serve.sh gives the server 10 s to end its models.
EXIT_SECONDS = 20
ENGINE_DEATH_SECONDS = 0.5
# Log text of a crash of Triton. Then it writes a trace and ends; but if the heap was corrupted
# (SIGABRT), the trace may wait for the heap's lock indefinitely: the server hangs in its own
# signal handler, and answers only control calls (measured with Triton 2.51).
CRASH = re.compile(r"^Signal \((?:6|11)\) received", re.MULTILINE)
TRACE_SECONDS = 5.0
# A load is abandoned after so long without CPU time and disk transfers. The longest such pauses of
# a load that continues are waits for a slow network disk. A vLLM model's load hangs indefinitely when
# the machine is suspended for some 2 s within a second of its start (measured).
LOAD_STALL_SECONDS = 60.0
ACTIVITY_INTERVAL_SECONDS = 2.0
MAX_STARTS = 3  # of the server, while its loads hang or crash
STUB = "triton_python_backend_stub"  # runs one instance of a model
_TRITON = ROOT / "triton"


class LoadLostError(Exception):
    """The server hangs or crashed while it loaded a model; another start may succeed."""


class EmbeddedTriton(processes.ChildPart):
    """One server with its models loaded; its ports stay the same over restarts."""

    def __init__(self, venv: Path, work: Path, models: Mapping[str, Path], log_file: Path) -> None:
        """`models` maps names to directories as in a Triton model repository."""
        super().__init__("Triton", log_file, grace=EXIT_SECONDS)
        self.models = dict(models)
        self._venv = venv.absolute()
        self._work = work.absolute()
        self._repository = self._work / "models"
        self._ports = {"grpc": 0, "metrics": 0}
        self.secret = new_secret()  # stays the same over restarts, too
        self._log_start = 0  # of the running server

    def address(self, protocol: str) -> str:
        return f"{HOST}:{self._ports[protocol]}"

    @property
    def environment(self) -> dict[str, str]:
        """The service's settings for this server, whose ports are chosen here."""
        self._choose_ports()
        return {
            "TRITON_HTTP_SERVICE": "",
            "TRITON_GRPC_SERVICE": self.address("grpc"),
            "LLM_TRITON_SECRET": self.secret,
            "TRITON_METRICS_SERVICE": self.address("metrics"),
            "LLM_MODEL_REPOSITORY": str(self._repository),
        }

    def client(self) -> TritonClient:
        return TritonClient(self.address("grpc"), self.secret)

    @property
    def is_down(self) -> bool:
        return self._process is None or self._process.poll() is not None or self._logs_a_crash()

    async def start(self, report: Callable[[str], None] = lambda _: None) -> None:
        if not self.is_down and await self._recover(report):
            return
        lost = ""
        for number in range(1, MAX_STARTS + 1):
            remark = f" (start {number} of {MAX_STARTS}: {lost})" if lost else ""
            try:
                await self._start_and_load(report, remark)
            except LoadLostError as error:
                lost = str(error)
                self._note(f"{lost}; start {number} of {MAX_STARTS} has failed")
            else:
                return
        await self._stop(signal.SIGKILL)
        raise StartError(f"Triton: {lost}, {MAX_STARTS} times (log: {self.log_file})")

    async def _start_and_load(self, report_plain: Callable[[str], None], remark: str) -> None:
        """Start the server and load its models; raises `StartError` and `LoadLostError`.

        `remark` ends each line of progress.
        """

        def report(text: str) -> None:
            report_plain(text + remark)

        # Also when only a model's process died: streams of its requests hang until the server ends.
        await self._stop(signal.SIGKILL)
        await self._start_server(report)
        try:
            async with self.client() as client:
                await self._load(client, report)
        except (TritonError, TritonUnavailableError, NotFoundError) as error:
            await self.stop()
            reason = " ".join(str(error).split())[:400]
            raise StartError(f"Triton: {reason} (log: {self.log_file})") from error

    async def wait(self) -> str:
        if self._process is None:
            return await super().wait()
        silence = 0
        async with self.client() as client:
            while True:
                watched = [self._process.pid]
                # A killed server refuses calls before its end shows, while its children have ended.
                if not silence:
                    watched += [child.pid for child in processes.descendants(self._process.pid)]
                await processes.any_exit(watched, PROBE_INTERVAL)
                has_crashed = await self._has_crashed()
                if self._process.poll() is not None:
                    return await super().wait()
                if has_crashed:
                    await processes.stop(self._process, signal.SIGKILL, EXIT_SECONDS)
                    return f"crashed and did not end (trace: {self.log_file})"
                try:
                    reason = await self._find_fault(client)
                except TritonUnavailableError:
                    silence += 1
                    reason = "does not answer" if silence >= MAX_UNANSWERED_CALLS else ""
                else:
                    silence = 0
                if reason and self._process.poll() is None:
                    return reason

    async def probe(self, client: TritonClient, model: str) -> str:
        """Generate one token; return the model's error, or "" if there is none."""
        if await self._has_lost_a_stub(client):
            return "has lost the process of a model"
        parameters = {"max_tokens": 1, "temperature": 0}
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                async for _ in client.generate(model, "a", parameters):
                    pass
        except (RefusedError, TimeoutError):
            return ""
        except GenerationError as error:
            return f"cannot generate with model {model} ({error})"
        return ""

    def _logs_a_crash(self) -> bool:
        return bool(CRASH.search(processes.log_text(self.log_file, self._log_start)))

    async def _has_crashed(self) -> bool:
        """True if the log reports a crash; the server has had the time to write its trace then."""
        assert self._process is not None
        if not self._logs_a_crash():
            return False
        await processes.any_exit([self._process.pid], TRACE_SECONDS)
        return True

    async def _find_fault(self, client: TritonClient) -> str:
        for model in self.models:
            if not await self._is_ready(client, model):
                return f"has lost model {model}"
            if reason := await self.probe(client, model):
                return reason
        return ""

    async def _has_lost_a_stub(self, client: TritonClient) -> bool:
        """True if fewer of the models' own processes run than models are reported ready.

        In place of a dead one Triton answers a request a second, with an error: a probe behind
        hundreds of requests would wait for minutes.
        """
        assert self._process is not None
        ready = sum(entry.ready and entry.name in self.models for entry in await client.index())
        stubs = 0
        for process in processes.descendants(self._process.pid):
            with contextlib.suppress(psutil.Error):  # it has ended
                stubs += process.exe().endswith(STUB)
        return stubs < ready

    async def _is_ready(self, client: TritonClient, model: str) -> bool:
        return any(entry.name == model and entry.ready for entry in await client.index())

    async def _recover(self, report: Callable[[str], None]) -> bool:
        """Load models whose backend unloaded them after their engine died; return True if all are well then."""
        # A backend needs a moment to detect and report that its engine died.
        await asyncio.sleep(ENGINE_DEATH_SECONDS)
        try:
            async with self.client() as client:
                await self._load(client, report)
        except (TritonError, TritonUnavailableError, NotFoundError, LoadLostError):
            return False
        return True

    async def _load(self, client: TritonClient, report: Callable[[str], None]) -> None:
        for model in self.models:
            if not await self._is_ready(client, model):
                await self._load_model(client, model, report)
            if reason := await self.probe(client, model):
                raise TritonError(reason)

    async def _load_model(
        self, client: TritonClient, model: str, report: Callable[[str], None]
    ) -> None:
        """Load one model. Raises `LoadLostError` when its load hangs or the server crashes."""
        assert self._process is not None
        begun = time.monotonic()
        activity = Activity(self._process.pid, ACTIVITY_INTERVAL_SECONDS)
        load = asyncio.create_task(client.load(model))
        try:
            while not load.done() and not await self._has_crashed():
                idle_seconds = activity.look()
                if idle_seconds >= LOAD_STALL_SECONDS:
                    raise LoadLostError(f"loading {model} hung for {idle_seconds:.0f} s")
                pause = (
                    f", {idle_seconds:.0f} s without progress"
                    if idle_seconds > ACTIVITY_INTERVAL_SECONDS
                    else ""
                )
                report(f"loading {model} ({time.monotonic() - begun:.0f} s{pause})")
                await asyncio.wait({load}, timeout=ACTIVITY_INTERVAL_SECONDS)
            if load.done() and isinstance(load.exception(), TritonUnavailableError):
                await processes.any_exit([self._process.pid], TRACE_SECONDS)
            if self.is_down:
                raise LoadLostError(f"Triton crashed while it loaded {model}")
            load.result()
        finally:
            if not load.done():
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)

    def _note(self, text: str) -> None:
        with self.log_file.open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} up: {text}\n")

    async def _start_server(self, report: Callable[[str], None]) -> None:
        report("starting the server")
        await self._lay_out()
        self._choose_ports()
        self._log_start = processes.begin_log(self.log_file)
        self._process = self._spawn(["serve.sh", self._venv, self._work, *self._options()])
        deadline = time.monotonic() + SERVER_SECONDS
        async with self.client() as client:
            while not await client.is_live():
                if self._process.poll() is not None:
                    last = processes.last_lines(self.log_file, self._log_start, 1)
                    raise StartError(f"Triton ended at its start: {last} (log: {self.log_file})")
                if time.monotonic() > deadline:
                    raise StartError(f"Triton did not start: see {self.log_file}")
                await asyncio.sleep(0.1)

    async def _lay_out(self) -> None:
        shutil.rmtree(self._repository, ignore_errors=True)
        self._repository.mkdir(parents=True)
        for name, directory in self.models.items():
            (self._repository / name).symlink_to(directory.absolute())
        log_start = processes.begin_log(self.log_file)
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
            "--allow-http=false",
            restriction(self.secret),
        ]
        for protocol, port in self._ports.items():
            options += [f"--{protocol}-address={HOST}", f"--{protocol}-port={port}"]
        return options

    def _choose_ports(self) -> None:
        for protocol, port in self._ports.items():
            self._ports[protocol] = port or processes.free_port()
