"""When maintenance judges leases: only after a full lease without a break of this process."""

from typing import cast

import pytest

from app.core.settings import Settings
from app.queue import maintenance
from app.queue.job_queue import JobQueue

LEASE_SECONDS = 15.0


class Clocks:
    """The clock of this process and the one of the database, which agree."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Queue:
    """Records the rescues; nothing expires."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.rescued_at: list[float] = []

    async def expire(self) -> int:
        return 0

    async def clock(self) -> float:
        return self.clocks.now + 1e9

    async def rescue(self, _lease: float) -> int:
        self.rescued_at.append(self.clocks.now)
        return 0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(maintenance, "time", clocks)
    return clocks


async def test_a_look_after_a_long_pause_judges_no_lease(clocks: Clocks) -> None:
    """The machine was suspended: the workers' renewals may have been, too."""
    queue = Queue(clocks)
    settings = Settings.model_construct(lease_seconds=LEASE_SECONDS)
    looking = maintenance.Maintenance(cast(JobQueue, queue), settings)

    async def look_each_second(seconds: int) -> None:
        for _ in range(seconds):
            clocks.now += 1.0
            await looking._look()

    await look_each_second(20)
    first = queue.rescued_at[0]
    assert first == 1000.0 + 1 + LEASE_SECONDS
    clocks.now += 4.0
    queue.rescued_at.clear()
    await look_each_second(15)
    assert queue.rescued_at == []
    await look_each_second(1)
    assert queue.rescued_at == [clocks.now]
