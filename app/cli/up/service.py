"""The service's own processes as parts: `python -m app serve` and `python -m app worker`."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from app.cli.up import processes
from app.cli.up.processes import StartError
from app.core.program import ROOT

START_SECONDS = 60.0
MIGRATE_SECONDS = 600.0


class ServicePart(processes.ChildPart):
    """A long-running command of this program: the API or a worker."""

    def __init__(
        self,
        name: str,
        command: str,
        environment: Mapping[str, str],
        log_file: Path,
        grace: float,
        ready_url: str = "",
    ) -> None:
        """It is ready when `ready_url` answers 200 or, if it is empty, when its log reports it.

        `grace` is its time to stop, in seconds.
        """
        super().__init__(name, log_file, grace=grace)
        self._command = command
        self._environment = environment
        self._ready_url = ready_url

    async def start(self, report: Callable[[str], None] = lambda _: None) -> None:
        report("starting")
        log_start = processes.begin_log(self.log_file)
        self._process = process = self._run()
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._is_ready(log_start):
                    if process.poll() is not None:
                        raise StartError(
                            f"{self.name} {processes.describe_status(process.returncode)}: "
                            f"{processes.last_lines(self.log_file, log_start, 1)} "
                            f"(log: {self.log_file})"
                        )
                    await asyncio.sleep(0.05)
        except TimeoutError:
            await self.stop()
            raise StartError(
                f"{self.name} was not ready in {START_SECONDS:.0f} s (log: {self.log_file})"
            ) from None

    def _run(self) -> subprocess.Popen[bytes]:
        return run(self._command, self._environment, self.log_file)

    async def _is_ready(self, log_start: int) -> bool:
        if not self._ready_url:
            return f"{self._command.split()[0]} ready" in processes.log_text(
                self.log_file, log_start
            )
        address = urlsplit(self._ready_url)
        request = f"GET {address.path} HTTP/1.0\r\nHost: {address.netloc}\r\n\r\n"
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(request.encode())
            status = await reader.readline()
            writer.close()
        except OSError:
            return False
        return b" 200 " in status


async def migrate(environment: Mapping[str, str], log_file: Path) -> None:
    log_start = processes.begin_log(log_file)
    process = run("migrate", environment, log_file)
    try:
        async with asyncio.timeout(MIGRATE_SECONDS):
            status = await processes.wait_exit(process)
    finally:
        process.kill()
    if status != 0:
        last = processes.last_lines(log_file, log_start, 1)
        raise StartError(f"The migration failed: {last} (log: {log_file})")


def run(command: str, environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start `python -m app <command>`; killed at our death: other workers take over its results.

    The command may have options.
    """
    return processes.spawn(
        [sys.executable, "-m", "app", *command.split()],
        log_file=log_file,
        env=environment,
        death_signal=signal.SIGKILL,
        cwd=ROOT,
    )
