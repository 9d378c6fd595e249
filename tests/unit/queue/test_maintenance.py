"""When maintenance judges leases: only after a full lease without a break of this process."""

from typing import cast

import pytest

from app.core import metrics
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
        self.cancelled_at: list[float] = []

    async def expire(self) -> int:
        return 0

    async def clock(self) -> float:
        return self.clocks.now + 1e9

    async def rescue(self, _lease: float) -> int:
        self.rescued_at.append(self.clocks.now)
        return 0

    async def cancel_abandoned(self) -> int:
        self.cancelled_at.append(self.clocks.now)
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


async def test_api_processes_are_judged_after_a_lease_of_theirs(clocks: Clocks) -> None:
    """After an outage, each of them has had the time to renew its row."""
    queue = Queue(clocks)
    settings = Settings.model_construct(lease_seconds=LEASE_SECONDS)
    looking = maintenance.Maintenance(cast(JobQueue, queue), settings)
    for _ in range(62):
        clocks.now += 1.0
        await looking._look()
    assert queue.cancelled_at == [1061.0, 1062.0]


async def test_rescued_results_are_counted(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(clocks)

    async def rescue(_lease: float) -> int:
        return 3

    monkeypatch.setattr(queue, "rescue", rescue)
    settings = Settings.model_construct(lease_seconds=1.0)
    looking = maintenance.Maintenance(cast(JobQueue, queue), settings)
    before = metrics.RESCUES.value
    for _ in range(3):
        clocks.now += 1.0
        await looking._look()
    assert metrics.RESCUES.value - before == 2 * 3
