"""The service as its real processes, to be killed, frozen and stopped by tests."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import psutil

from app.cli.up import processes
from app.cli.up.postgres import EmbeddedPostgres
from app.cli.up.processes import StartError
from app.cli.up.service import ServicePart
from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_client import TritonClient
from tests.chaos.history import LOG_EVERYTHING
from tests.chaos.http_client import HttpClient
from tests.postgres import PostgresServer

LEASE_SECONDS = 4.0  # a machine that stalls for less than two thirds fences no worker
GRACE_SECONDS = 3.0
PARAMETERS = {"max_tokens": 200}
_ASKED_AT_ONCE = 250
_CONNECTIONS = 200  # as many POSTs are under way at once


class Process(ServicePart):
    """API or worker: `python -m app serve` or `python -m app worker`."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class MortalTriton(EmbeddedTriton):
    """A tritonserver whose processes can be killed."""

    _orphans: Sequence[psutil.Process] = ()

    def kill_server(self) -> None:
        """Kill the server alone; its stub ends by itself, or is ended by `stop`."""
        assert self._process is not None
        self._orphans = processes.descendants(self._process.pid)
        self._process.kill()

    async def stop(self) -> None:
        await super().stop()
        processes.kill(self._orphans)  # `up` reaps such orphans

    def send_signal(self, number: signal.Signals) -> None:
        """Freeze or thaw the server and the model's process."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill_engine(self) -> None:
        """Kill vLLM's engine process, which the model's own process has started."""
        engines = [one for one in self.family() if "EngineCore" in " ".join(_command(one))]
        assert engines, "Triton runs no engine"
        processes.kill(engines)

    def kill_stub(self) -> None:
        """Kill the model's own process."""
        stubs = self.stubs()
        assert stubs, "Triton runs no stub"
        processes.kill(stubs)

    def stubs(self) -> list[psutil.Process]:
        """The models' own processes."""
        return [one for one in self.family()[1:] if "stub" in "".join(_command(one)[:1])]

    def family(self) -> list[psutil.Process]:
        """The server and all processes below it."""
        assert self._process is not None
        return processes.family(self._process.pid)


def _command(process: psutil.Process) -> list[str]:
    """The command line of a process; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


class MortalPostgres(EmbeddedPostgres):
    """A PostgreSQL that can be killed and frozen, all its processes at once."""

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if number == signal.SIGINT:
            # The server must shut down its processes: at a signal of its own, the checkpointer would
            # write the final checkpoint while others still write.
            self._process.send_signal(number)
        else:
            _signal_family(self._process.pid, number)


def _signal_family(pid: int, number: signal.Signals) -> None:
    for process in (psutil.Process(pid), *processes.descendants(pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class Part(Protocol):
    """A process that a supervisor restarts."""

    async def start(self) -> None: ...
    async def wait(self) -> str: ...


async def revive(part: Part) -> None:
    """Wait for the end of a part and start it again, as the supervisor of `up` does."""
    await part.wait()
    await _bring_up(part)


async def _bring_up(part: Part) -> None:
    while True:
        try:
            return await part.start()
        except StartError:  # e.g. processes of the dead PostgreSQL still hold its shared memory
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def kept_running(part: Part) -> AsyncIterator[list[str]]:
    """Revive a part each time it dies; a start under way at the end is finished.

    Yields the reasons of its deaths so far.
    """
    starting = asyncio.Lock()
    deaths: list[str] = []

    async def keep() -> None:
        while True:
            deaths.append(await part.wait())
            async with starting:
                await _bring_up(part)

    task = asyncio.create_task(keep())
    try:
        yield deaths
    finally:
        async with starting:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class Stack:
    """A database, an API and any number of workers, with a client that speaks HTTP to the API."""

    directory: Path
    postgres: PostgresServer
    database: str
    environment: dict[str, str]
    client: HttpClient
    api: Process
    workers: dict[str, Process] = field(default_factory=dict)
    more_apis: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    triton_deaths: Sequence[str] = ()  # where Triton is kept running

    async def start_api(self, name: str, command: str = "serve", **changes: str) -> Process:
        """Start a further API, on a port of its own: `ports[name]`.

        With `command` "serve --with-worker" it is a worker as well.
        """
        self.ports[name] = processes.free_port()
        environment = self.environment | {"LLM_PORT": str(self.ports[name])} | changes
        api = self.more_apis[name] = _api(self.directory, environment, name, command)
        await api.start()
        return api

    async def restart_api(self, **changes: str) -> None:
        """Start the API again, on the same port, with settings of its own."""
        await self.api.stop()
        self.api = _api(self.directory, self.environment | changes)
        await self.api.start()

    async def start_worker(self, name: str, **changes: str) -> Process:
        """Start a worker that connects as a PostgreSQL role of its own, called like it.

        So the history shows which process wrote, under every id.
        """
        environment = self.environment | {"LLM_DATABASE_ADMIN_USER": name} | changes
        log_file = self.directory / f"worker_{name}.log"
        worker = Process(name, "worker", environment, log_file, grace=GRACE_SECONDS + 10)
        self.workers[name] = worker
        await worker.start()
        return worker

    async def send(self, prompts: Sequence[str]) -> dict[str, str]:
        """POST every prompt at once; each id that the client received, with its prompt."""
        ids = await asyncio.gather(*(self.send_one(prompt) for prompt in prompts))
        return dict(zip(ids, prompts, strict=True))

    async def send_one(self, prompt: str, model: str = "scripted", **parameters: object) -> str:
        """POST a prompt; its id. Raises ConnectionError when the API goes away meanwhile."""
        body = {"model": model, "content": prompt, "parameters": PARAMETERS | parameters}
        answer = await self.client.post("/results/", body)
        assert answer.status == 202, answer
        return str(answer.json["id"])

    async def read(self, ids: Iterable[str]) -> list[dict[str, Any]]:
        """The results of these ids as the API returns them."""
        answers = await asyncio.gather(*(self.client.get(f"/results/{one}") for one in ids))
        assert all(answer.status == 200 for answer in answers)
        return [answer.json for answer in answers]

    async def fetch(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        """Ask the database, on a connection of this question's own."""
        connection = await asyncpg.connect(
            host=self.postgres.host,
            port=self.postgres.port,
            user=self.postgres.user,
            password=self.postgres.password,
            database=self.database,
        )
        try:
            return list(await connection.fetch(query, *arguments))
        finally:
            await connection.close()

    async def count(self, condition: str) -> int:
        """The number of results that meet an SQL condition."""
        (row,) = await self.fetch(f"SELECT count(*) FROM results r WHERE {condition}")
        return int(row["count"])

    async def until(self, condition: str, count: int, seconds: float) -> None:
        """Wait until at least so many results meet an SQL condition."""
        await until(lambda: self._is_reached(condition, count), seconds, condition)

    async def _is_reached(self, condition: str, count: int) -> bool:
        return await self.count(condition) >= count

    async def until_terminal(self, seconds: float) -> None:
        """Wait until no result is pending."""

        async def is_over() -> bool:
            return await self.count("state = 'pending'") == 0

        await until(is_over, seconds, "no result is pending")

    def log(self, name: str) -> str:
        """The log of a process."""
        return self.parts[name].log_file.read_text()

    @property
    def parts(self) -> dict[str, Process]:
        """All processes of the service, by name."""
        return {"api": self.api} | self.more_apis | self.workers


# A result of which some text has come.
SPEAKING = """state = 'pending' AND worker_id IS NOT NULL AND EXISTS (
  SELECT FROM result_chunks c WHERE c.result_id = r.id AND c.attempt = r.attempt)"""


async def until(
    condition: Callable[[], Awaitable[bool]], seconds: float, what: str = "the condition"
) -> None:
    """Look again and again until a condition holds; fails when it does not in time."""
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(seconds):
            while not await condition():
                passed = asyncio.get_running_loop().time() - began
                # The longer it takes, the less often: most questions open a connection.
                await asyncio.sleep(min(0.2, max(0.05, passed / 20)))
    except TimeoutError:
        raise AssertionError(f"not in {seconds:.0f} s: {what}") from None


@contextlib.asynccontextmanager
async def open_stack(
    directory: Path,
    postgres: PostgresServer,
    database: str,
    triton: EmbeddedTriton,
    **changes: str,
) -> AsyncIterator[Stack]:
    """A migrated database that logs all that happens to its results, and an API before it.

    `changes` are settings of all its processes.
    """
    port = processes.free_port()
    environment = os.environ | {
        "LLM_DATABASE_URL": f"{postgres.host}:{postgres.port}",
        "LLM_DATABASE_ADMIN_USER": postgres.user,
        "LLM_DATABASE_PASSWORD": postgres.password,
        "LLM_DATABASE_DB": database,
        "LLM_PORT": str(port),
        "LLM_LEASE_SECONDS": str(LEASE_SECONDS),
        "LLM_SHUTDOWN_GRACE_SECONDS": str(GRACE_SECONDS),
        "LLM_POLL_SECONDS": "0.2",
        "LLM_FLUSH_SECONDS": "0.3",
        "LLM_TRITON_REFRESH_SECONDS": "0.5",
        "LLM_WORKER_SLOTS": "600",
        **triton.environment,
        **changes,
    }
    api = _api(directory, environment)
    async with HttpClient("127.0.0.1", port, _CONNECTIONS) as client:
        stack = Stack(directory, postgres, database, environment, client, api)
        stack.ports["api"] = port
        await _prepare(stack)
        try:
            await api.start()
            yield stack
        finally:
            for part in stack.parts.values():
                await part.stop()


def _api(
    directory: Path, environment: dict[str, str], name: str = "api", command: str = "serve"
) -> Process:
    ready_url = f"http://127.0.0.1:{environment['LLM_PORT']}/health/ready"
    log_file = directory / f"{name}.log"
    return Process(name, command, environment, log_file, ready_url=ready_url, grace=10)


async def _prepare(stack: Stack) -> None:
    """Roles for the workers, and the log of everything that happens to results."""
    for name in ("alice", "bob"):
        await stack.fetch(
            f"""DO $$ BEGIN
              IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') THEN
                CREATE ROLE {name} SUPERUSER LOGIN PASSWORD '{stack.postgres.password}';
              END IF;
            END $$"""
        )
    for statement in LOG_EVERYTHING:
        await stack.fetch(statement)


async def ask_directly(triton: EmbeddedTriton, prompts: Sequence[str]) -> dict[str, str]:
    """The model's output for each prompt, generated without the service."""
    slots = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def ask(client: TritonClient, prompt: str) -> str:
        async with slots:
            deltas = client.generate("scripted", prompt, PARAMETERS)
            return "".join([delta.text async for delta in deltas])

    async with triton.client() as client:
        texts = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
    return dict(zip(prompts, texts, strict=True))


async def check_completed(stack: Stack, accepted: dict[str, str], expected: dict[str, str]) -> None:
    """Every id that a client received is completed, with the model's bytes."""
    assert len(accepted) == len(expected)
    for result in await stack.read(accepted):
        assert result["state"] == "completed", result
        assert result["result"].encode() == expected[accepted[str(result["id"])]].encode()
