"""The real parts: PostgreSQL with fsync on, Triton with the scripted model, API, worker, baselines.

Every server is a process of its own with a port of its own, and ends with its context.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import asyncpg
import httpx
import psutil

from app.cli.up import processes, service
from app.cli.up.postgres import HOST, USER, EmbeddedPostgres
from app.cli.up.triton import EmbeddedTriton
from bench import progress

MODEL = "scripted"
_ROOT = Path(__file__).resolve().parents[1]
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


@dataclass(slots=True, frozen=True)
class Server:
    """A running process, and the port it serves (0: none)."""

    pid: int
    port: int


class House:
    """The servers that all goals of one run share. Use it inside `async with`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._logs = directory / "logs"
        self._postgres = EmbeddedPostgres(directory / "postgres", self._logs / "postgres.log")
        self.triton = EmbeddedTriton(
            _ROOT / ".venv-triton",
            directory / "triton",
            {MODEL: _ROOT / "triton" / "models" / MODEL},
            self._logs / "triton.log",
        )

    async def __aenter__(self) -> "House":
        progress.show("starting PostgreSQL and Triton")
        await self._postgres.start()
        await self.triton.start()
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.triton.stop()
        await self._postgres.stop()

    @property
    def postgres_pid(self) -> int:
        """The postmaster; its children serve the connections."""
        pid_file = self.directory / "postgres" / "cluster" / "postmaster.pid"
        return int(pid_file.read_text().split()[0])

    @property
    def triton_pid(self) -> int:
        """The server; its child runs the model."""
        return next(
            child.pid for child in psutil.Process().children() if child.name() == "tritonserver"
        )

    @property
    def triton_address(self) -> str:
        return self.triton.address("grpc")

    async def connect(self, database: str) -> asyncpg.Connection:
        """A connection to a database of this house."""
        connection: asyncpg.Connection = await asyncpg.connect(
            host=HOST,
            port=self._postgres.port,
            user=USER,
            password=self._postgres.password,
            database=database,
        )
        return connection

    @property
    def libpq_environment(self) -> dict[str, str]:
        """The server's name for clients that are not part of the service."""
        return {
            "PGHOST": HOST,
            "PGPORT": str(self._postgres.port),
            "PGUSER": USER,
            "PGPASSWORD": self._postgres.password,
        }

    async def postgres_version(self) -> str:
        """The version that the server reports."""
        connection = await self.connect("postgres")
        try:
            return str(await connection.fetchval("SHOW server_version"))
        finally:
            await connection.close()

    async def environment(self, database: str) -> dict[str, str]:
        """Settings of a service on a new, migrated database."""
        progress.show(f"making the database {database}")
        connection = await self.connect("postgres")
        try:
            await connection.execute(f"CREATE DATABASE {database}")
        finally:
            await connection.close()
        environment = {
            **os.environ,
            **self._postgres.environment,
            **self.triton.environment,
            "LLM_DATABASE_DB": database,
        }
        await service.migrate(environment, self._logs / "migrate.log")
        return environment

    @contextlib.asynccontextmanager
    async def api(
        self, environment: Mapping[str, str], *, with_worker: bool = False, model: str = MODEL
    ) -> AsyncIterator[Server]:
        """`python -m app serve`, once it accepts results and knows `model`."""
        port = processes.free_port()
        settings = {**environment, "LLM_HOST": HOST, "LLM_PORT": str(port)}
        command = ["-m", "app", "serve", *(["--with-worker"] if with_worker else [])]
        async with self._run(command, settings, "api.log") as pid:
            url = f"http://{HOST}:{port}/health/ready"
            await self.until_ready(pid, lambda: answers(url, model))
            yield Server(pid, port)

    @contextlib.asynccontextmanager
    async def ui(self, environment: Mapping[str, str], api: Server) -> AsyncIterator[Server]:
        """`python -m app ui` in front of that API."""
        port = processes.free_port()
        settings = {
            **environment,
            "LLM_UI_HOST": HOST,
            "LLM_UI_PORT": str(port),
            "LLM_UI_API_URL": f"http://{HOST}:{api.port}",
        }
        async with self._run(["-m", "app", "ui"], settings, "ui.log") as pid:
            await self.until_ready(pid, lambda: answers(f"http://{HOST}:{port}/ready", "ok"))
            yield Server(pid, port)

    @contextlib.asynccontextmanager
    async def worker(self, environment: Mapping[str, str], *options: str) -> AsyncIterator[Server]:
        """`python -m app worker` with these options, once it claims."""
        start = processes.begin_log(self._logs / "worker.log")

        async def is_ready() -> bool:
            return "worker ready" in processes.log_text(self._logs / "worker.log", start)

        async with self._run(["-m", "app", "worker", *options], environment, "worker.log") as pid:
            await self.until_ready(pid, is_ready)
            yield Server(pid, 0)

    @contextlib.asynccontextmanager
    async def baselines(self, environment: Mapping[str, str]) -> AsyncIterator[Server]:
        """The routes of `bench.baselines`, on the same HTTP server with the same settings."""
        port = processes.free_port()
        settings = {**environment, "LLM_HOST": HOST, "LLM_PORT": str(port)}
        async with self._run(["-m", "bench.baselines"], settings, "baselines.log") as pid:
            await self.until_ready(pid, lambda: answers(f"http://{HOST}:{port}/fixed", ""))
            yield Server(pid, port)

    @contextlib.asynccontextmanager
    async def _run(
        self, arguments: list[str], environment: Mapping[str, str], log: str
    ) -> AsyncIterator[int]:
        progress.show(f"starting python {' '.join(arguments)}")
        process = processes.spawn(
            [sys.executable, *arguments],
            log_file=self._logs / log,
            env=environment,
            death_signal=signal.SIGKILL,
            cwd=_ROOT,
        )
        try:
            yield process.pid
        finally:
            await processes.stop(process, signal.SIGTERM, _STOP_SECONDS)

    async def until_ready(self, pid: int, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a server; raises RuntimeError where its process ended instead."""
        async with asyncio.timeout(_START_SECONDS):
            while not await is_ready():
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    raise RuntimeError(f"a server ended at its start; see the logs in {self._logs}")
                await asyncio.sleep(0.05)


async def answers(url: str, text: str) -> bool:
    """Return True if a GET is answered 200 with this text in it."""
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        try:
            answer = await client.get(url)
        except httpx.TransportError:
            return False
    return answer.status_code == httpx.codes.OK and text in answer.text
