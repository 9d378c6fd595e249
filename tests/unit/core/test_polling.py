"""The polling loop: pauses, wake-ups, and a database that is unavailable for a time."""

import asyncio
import logging

import pytest

from app.core.errors import DatabaseUnavailableError
from app.core.polling import PollingLoop
from app.core.waiting import cancel_all


class Steps:
    """Steps that end as scripted: by a pause, or an error; then by pauses without an end."""

    def __init__(self, *script: float | Exception | None) -> None:
        self._script = list(script)
        self.count = 0
        self.done = asyncio.Event()

    async def __call__(self) -> float | None:
        self.count += 1
        if not self._script:
            self.done.set()
            return 3600
        outcome = self._script.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def test_a_step_sets_its_pause() -> None:
    steps = Steps(0, 0)
    running = asyncio.create_task(PollingLoop("steps", steps, seconds=3600).run())
    await steps.done.wait()
    assert steps.count == 3
    await cancel_all([running])
    assert running.cancelled()


async def test_without_a_pause_of_its_own_the_loops_counts() -> None:
    steps = Steps(None, None)
    running = asyncio.create_task(PollingLoop("steps", steps, seconds=0).run())
    await steps.done.wait()
    await cancel_all([running])


async def test_a_wake_up_during_a_step_or_a_pause_begins_the_next() -> None:
    steps = Steps(3600, 3600)
    paused = asyncio.Event()

    async def step() -> float | None:
        if not steps.count:
            loop.wake()
        elif not steps.done.is_set():
            asyncio.get_running_loop().call_soon(paused.set)
        return await steps()

    loop = PollingLoop("steps", step, seconds=3600)
    running = asyncio.create_task(loop.run())
    await paused.wait()
    assert steps.count == 2
    loop.wake()
    await steps.done.wait()
    assert steps.count == 3
    await cancel_all([running])


async def test_an_unavailable_database_is_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = Steps(DatabaseUnavailableError("no answer"), ConnectionRefusedError("refused"))
    with caplog.at_level(logging.INFO, "app.core.polling"):
        running = asyncio.create_task(PollingLoop("steps", steps, seconds=0.01).run())
        await steps.done.wait()
    await cancel_all([running])
    assert [record.getMessage() for record in caplog.records] == [
        "steps: waiting for the database: no answer",
        "steps: waiting for the database: refused",
    ]
    assert {record.__dict__["action"] for record in caplog.records} == {"poll_failed"}


async def test_another_error_ends_the_loop() -> None:
    steps = Steps(0, KeyError("bug"))
    with pytest.raises(KeyError, match="bug"):
        await PollingLoop("steps", steps, seconds=3600).run()
    assert steps.count == 2
