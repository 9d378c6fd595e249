"""`python -m app worker`: it ends with its worker, and with any task beside it."""

import asyncio
from typing import cast

import pytest

from app.cli.worker import _run_beside
from app.worker.worker import Worker


class Stoppable:
    """The two methods of a worker that its command calls."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        await self.stopping.wait()

    def stop(self) -> None:
        self.stopping.set()


async def fail() -> None:
    raise RuntimeError("the listener has died")


async def test_a_task_that_fails_stops_the_worker_and_raises_its_error() -> None:
    worker = Stoppable()
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="the listener has died"):
            await _run_beside(cast(Worker, worker), [asyncio.create_task(fail())])
    assert worker.stopping.is_set()


async def test_a_worker_that_stops_ends_the_command() -> None:
    worker = Stoppable()
    endless = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(worker.stop)
    async with asyncio.timeout(30):
        await _run_beside(cast(Worker, worker), [cast("asyncio.Task[None]", endless)])
    assert not endless.done()
    endless.cancel()
