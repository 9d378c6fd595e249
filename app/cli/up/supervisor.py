"""Keeps parts running: starts them with progress, restarts those that die, stops all in reverse."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from app.cli.up import processes
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.core.waiting import cancel_all

FIRST_DELAY = 0.1
MAX_DELAY = 15.0
# A part that ran this long counts as healthy: its next restart is immediate again.
HEALTHY_SECONDS = 60.0
REAP_INTERVAL = 1.0
# A parent that stops in good order ends its children itself; orphans older than this are ended.
ORPHAN_GRACE = 3.0


class Part(Protocol):
    """A component with processes of its own."""

    @property
    def name(self) -> str:
        """The name in messages."""

    async def start(self, report: Callable[[str], None]) -> None:
        """Start it from any state; raises `StartError`."""

    async def wait(self) -> str:
        """Return the reason when it is down."""

    async def stop(self) -> None: ...


class Supervisor:
    """Owns the parts given to `start`. The process must start no children by other ways."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._parts: list[Part] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, part: Part) -> None:
        """Start a part and keep it running from then on; raises `StartError` the first time."""
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._reap(), name="reap orphans"))
        self._parts.append(part)
        async with self._progress.step(part.name) as step:
            await part.start(step.report)
        self._tasks.append(asyncio.create_task(self._keep(part), name=f"keep {part.name}"))

    async def wait(self) -> None:
        """Wait indefinitely; ends only with the error of a task that should not have ended."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Stop the parts, the last one first, and all their remaining processes."""
        await cancel_all(self._tasks)
        for part in reversed(self._parts):
            async with self._progress.step(part.name, done="stopped") as step:
                step.report("stopping")
                await part.stop()
        processes.reap_orphans(grace=0, launches=True)

    async def _keep(self, part: Part) -> None:
        delay = FIRST_DELAY
        while True:
            since = time.monotonic()
            reason = await part.wait()
            if time.monotonic() - since > HEALTHY_SECONDS:
                delay = FIRST_DELAY
            self._progress.line(f"{part.name} {reason}; restarting it")
            while True:
                await asyncio.sleep(delay)
                delay = min(delay * 3, MAX_DELAY)
                processes.reap_orphans(grace=0)
                try:
                    async with self._progress.step(part.name, done="is back") as step:
                        await part.start(step.report)
                    break
                except StartError as error:
                    self._progress.line(f"{error}. Next try in {delay:.0f} s")

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_INTERVAL)
            processes.reap_orphans(ORPHAN_GRACE)
