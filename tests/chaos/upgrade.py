"""An upgrade under load: the schema is migrated, then processes of a former version give way to new ones.

`make upgrade FROM=REVISION`, or `python -m tests.chaos.upgrade REVISION`. The former version is a revision of
this repository; it runs with the installed packages. See docs/chaos.md.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from app.cli.up import processes
from app.cli.up.postgres import DATABASE, HOST
from app.cli.up.service import migrate
from app.cli.up.triton import EmbeddedTriton
from tests.chaos.failover import Load, make_prompts
from tests.chaos.history import LOG_EVERYTHING, check_history, check_logs
from tests.chaos.http_client import HttpClient
from tests.chaos.replication import address
from tests.chaos.stack import (
    LEASE_SECONDS,
    MortalPostgres,
    Process,
    Stack,
    ask_directly,
    check_completed,
    until,
)
from tests.conftest import ROOT, SCRIPTED, TRITON_VENV

Log = Callable[[str], None]

_CONNECTIONS = 200
_END_SECONDS = 120.0
_GIT = ("git", "-C", str(ROOT))
_USAGE = """
SELECT (SELECT sum(results) FROM (SELECT results FROM usage_days UNION ALL SELECT results FROM usage_entries) u)
  IS NOT DISTINCT FROM (SELECT count(*) FROM results)::numeric AS is_whole
"""
# Results that the former version indexes are counted by a second walk, a day after the first.
_A_DAY_PASSES = """
UPDATE digest_state SET resumes_at = now() WHERE passes_left > 0 AND resumes_at > now() + interval '1 hour'
"""


class FormerProcess(Process):
    """An API or a worker of another revision."""

    repository = ROOT

    def _run(self) -> subprocess.Popen[bytes]:
        return _spawn(self.repository, self._command, self._environment, self.log_file)


def _spawn(
    repository: Path, command: str, environment: Mapping[str, str], log_file: Path
) -> subprocess.Popen[bytes]:
    return processes.spawn(
        [sys.executable, "-m", "app", *command.split()],
        log_file=log_file,
        env=environment,
        death_signal=signal.SIGKILL,
        cwd=repository,
    )


async def upgrade(
    revision: str, results: int, per_second: float, directory: Path, log: Log = lambda _: None
) -> None:
    """Do it. Raises AssertionError if a result is lost, doubled, wrong or not counted."""
    prompts = make_prompts(results)
    with _checked_out(revision, directory / "former") as repository:
        async with _open_service(repository, directory) as (stack, triton):
            log(f"API and two workers of {revision} are ready")
            load = Load(stack)
            sending = asyncio.create_task(load.send(prompts, per_second))
            await load.until_accepted(results // 5)
            began = time.monotonic()
            await migrate(stack.environment, directory / "migrate.log")
            log(f"the schema is migrated, in {time.monotonic() - began:.1f} s")
            await load.until_accepted(len(load.accepted) + results // 5)
            async with _new_processes(stack) as client:
                log("an API and a worker of this version are ready")
                await load.until_accepted(min(results, len(load.accepted) + results // 5))
                stack.client = client
                await asyncio.gather(*(part.stop() for part in _former(stack)))
                log("the former version's processes have ended")
                await sending
                log(f"all is sent: {len(load.accepted)} ids, {load.refused.total()} answered 503")
                await stack.until_terminal(_END_SECONDS)
                await check_completed(stack, load.accepted, await ask_directly(triton, prompts))
                assert await stack.count("true") == results
                await check_history(stack)
                check_logs(stack)
                log("each result has completed once, with the model's text")
                await until(lambda: _is_counted(stack), _END_SECONDS, "each result is counted")
                log("the ledger of usage has each result once")
    log(f"the longest time between two ids was {load.longest_pause:.2f} s")


@contextlib.contextmanager
def _checked_out(revision: str, directory: Path) -> Iterator[Path]:
    subprocess.run([*_GIT, "worktree", "add", "-q", "--detach", directory, revision], check=True)
    try:
        yield directory
    finally:
        subprocess.run([*_GIT, "worktree", "remove", "--force", directory], check=True)


@contextlib.asynccontextmanager
async def _open_service(
    repository: Path, directory: Path
) -> AsyncIterator[tuple[Stack, EmbeddedTriton]]:
    """PostgreSQL, Triton, and an API and two workers of another revision, on its schema."""
    postgres = MortalPostgres(directory / "postgres", directory / "postgres.log")
    triton = EmbeddedTriton(TRITON_VENV, directory / "triton", SCRIPTED, directory / "triton.log")
    async with contextlib.AsyncExitStack() as open_ones:
        for server in (postgres, triton):
            open_ones.push_async_callback(server.stop)
            await server.start()
        port = processes.free_port()
        environment = dict(os.environ) | postgres.environment | triton.environment
        environment |= {"LLM_PORT": str(port), "LLM_LEASE_SECONDS": str(LEASE_SECONDS)}
        log_file = directory / "former_migrate.log"
        migration = _spawn(repository, "migrate", environment, log_file)
        assert await processes.wait_exit(migration) == 0, processes.last_lines(log_file, 0)
        client = await open_ones.enter_async_context(HttpClient(HOST, port, _CONNECTIONS))
        parts = {}
        for name in ("serve", "worker 1", "worker 2"):
            ready = f"http://{HOST}:{port}/health/ready" if name == "serve" else ""
            log_file = directory / f"former_{name.replace(' ', '_')}.log"
            parts[name] = FormerProcess(
                f"former {name}", name.split()[0], environment, log_file, 10, ready
            )
            parts[name].repository = repository
        api = parts.pop("serve")
        stack = Stack(directory, address(postgres), DATABASE, environment, client, api)
        stack.workers |= parts
        for statement in LOG_EVERYTHING:
            await stack.fetch(statement)
        for part in (api, *parts.values()):
            open_ones.push_async_callback(part.stop)
            await part.start()
        yield stack, triton


@contextlib.asynccontextmanager
async def _new_processes(stack: Stack) -> AsyncIterator[HttpClient]:
    """An API and a worker of this version; yields a client of the API."""
    worker = Process(
        "worker", "worker", stack.environment, stack.directory / "worker.log", grace=10
    )
    try:
        api = await stack.start_api("new api")
        await worker.start()
        stack.workers["new worker"] = worker
        async with HttpClient(HOST, stack.ports["new api"], _CONNECTIONS) as client:
            yield client
        await api.stop()
    finally:
        await worker.stop()


def _former(stack: Stack) -> list[Process]:
    return [part for part in stack.parts.values() if isinstance(part, FormerProcess)]


async def _is_counted(stack: Stack) -> bool:
    await stack.fetch(_A_DAY_PASSES)
    (row,) = await stack.fetch(_USAGE)
    return bool(row["is_whole"])


def main() -> None:
    """Show it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.upgrade", description=__doc__)
    parser.add_argument("revision", help="the former version, as git names it")
    parser.add_argument("--results", type=int, default=2000, help="how many are sent (2000)")
    parser.add_argument("--per-second", type=float, default=50.0, help="how many a second (50)")
    options = parser.parse_args()
    began = time.monotonic()

    def log(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:6.2f} s  {text}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="llm-upgrade-") as name:
        Path(name).chmod(0o755)  # PostgreSQL may run as another user
        asyncio.run(upgrade(options.revision, options.results, options.per_second, Path(name), log))


if __name__ == "__main__":
    main()
