"""The terminal's output while parts start: one changing line, or plain lines in a log."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self, TextIO

REDRAW_SECONDS = 0.2
# A terminal that cannot redraw gets a line per step this often, and none for quick steps.
REPEAT_SECONDS = 5.0
QUIET_SECONDS = 2.0


class Step:
    def __init__(self, name: str) -> None:
        self.name = name
        self.detail = ""
        self.started = time.monotonic()
        self.reported_at = self.started + QUIET_SECONDS - REPEAT_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def report(self, detail: str) -> None:
        self.detail = detail

    def __str__(self) -> str:
        what = f"{self.name}: {self.detail}" if self.detail else self.name
        return f"{what} {self.seconds:.0f} s"


class Progress:
    """Prints finished steps and messages as lines, and running steps as one changing line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moving = stream.isatty()
        self._steps: list[Step] = []
        self._drawn = False
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ticker = asyncio.create_task(self._tick(), name="progress")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._erase()

    @asynccontextmanager
    async def step(self, name: str, done: str = "ready") -> AsyncIterator[Step]:
        step = Step(name)
        self._steps.append(step)
        try:
            yield step
        finally:
            self._steps.remove(step)
        self.line(f"  {name} {done} ({step.seconds:.1f} s)")

    def line(self, text: str) -> None:
        self._erase()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    async def _tick(self) -> None:
        while True:
            if self._moving:
                self._redraw()
            else:
                self._repeat()
            await asyncio.sleep(REDRAW_SECONDS)

    def _redraw(self) -> None:
        self._erase()
        if self._steps:
            # Cut, not wrapped: an erased line must be one line of the terminal.
            self._stream.write(("  " + " · ".join(map(str, self._steps)))[:78])
            self._stream.flush()
            self._drawn = True

    def _repeat(self) -> None:
        now = time.monotonic()
        for step in self._steps:
            if now - step.reported_at >= REPEAT_SECONDS:
                step.reported_at = now
                self._stream.write(f"  {step}\n")
                self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False
