"""CPU time of processes over the middle of a load: from the last stream's first token on, up to the
end of the first one.

The chunks of the script hold the times of the steps that made them, so that the tokens of any stretch can be counted
afterwards, whether a client read them or not.
"""

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil

from bench.cpu import exact_seconds, tree_seconds

_INTERVAL_SECONDS = 0.5
_LEAST_SECONDS = 0.4  # of a stretch: CPU time is counted in steps of 10 ms

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Reading:
    """CPU seconds of each part until a moment, which is in ns of CLOCK_MONOTONIC."""

    at: int
    cpu: Mapping[str, float]


@dataclass(slots=True, frozen=True)
class Window:
    """A stretch between two readings, in ns of CLOCK_MONOTONIC, and what happened in it."""

    began: int
    ended: int
    tokens: int  # that the model made
    cpu: Mapping[str, float]  # seconds of each part, less what it uses when idle

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / 1e9

    @property
    def rate(self) -> float:
        """Tokens that the model made per second."""
        return self.tokens / self.seconds

    def microseconds(self, *parts: str) -> float:
        """CPU time per token of these parts together."""
        return sum(self.cpu[part] for part in parts) / self.tokens * 1e6


def read(parts: Mapping[str, int]) -> Reading:
    """CPU seconds of the process trees until now; to the microsecond of the part `postgres`.

    PostgreSQL has dozens of processes, whose time would be rounded to 10 ms each.
    """
    cpu = {
        name: exact_seconds(pid) if name == "postgres" else tree_seconds(pid)
        for name, pid in parts.items()
    }
    return Reading(time.monotonic_ns(), cpu)


async def record(parts: Mapping[str, int], work: Awaitable[T]) -> tuple[T, list[Reading]]:
    """Await `work`; its result, and readings of these process trees meanwhile."""
    readings = []
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            # The load itself may be one of the processes, and has just ended.
            with contextlib.suppress(psutil.NoSuchProcess):
                readings.append(read(parts))
            await asyncio.wait({task}, timeout=_INTERVAL_SECONDS)
        return task.result(), readings
    finally:
        task.cancel()


async def idle_shares(parts: Mapping[str, int], seconds: float) -> dict[str, float]:
    """The share of a core that each part uses while there is nothing to do."""
    before = read(parts)
    await asyncio.sleep(seconds)
    after = read(parts)
    length = (after.at - before.at) / 1e9
    return {name: (after.cpu[name] - before.cpu[name]) / length for name in parts}


def cut(
    readings: Sequence[Reading], made: Sequence[Sequence[int]], idle: Mapping[str, float]
) -> Window:
    """The longest stretch between readings in which every stream has begun and none has ended.

    `made` has the times of the tokens of each stream, in order; `idle` the shares of
    a core to subtract. Raises RuntimeError if there is no such stretch.
    """
    begins = max(stream[0] for stream in made)
    ends = min(stream[-1] for stream in made)
    inside = [reading for reading in readings if begins <= reading.at <= ends]
    if not inside or inside[-1].at - inside[0].at < _LEAST_SECONDS * 1e9:
        length = (ends - begins) / 1e9
        raise RuntimeError(f"all streams ran at the same time for {length:.1f} s only")
    first, last = inside[0], inside[-1]
    tokens = sum(bisect_left(stream, last.at) - bisect_left(stream, first.at) for stream in made)
    seconds = (last.at - first.at) / 1e9
    cpu = {
        name: last.cpu[name] - first.cpu[name] - idle.get(name, 0) * seconds for name in last.cpu
    }
    return Window(first.at, last.at, tokens, cpu)
