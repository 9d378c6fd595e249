"""Our queue alone: results stored, claimed and ended by `app.queue.job_queue`, with no HTTP and no model.

    python -m bench.queue_part JOBS CALLERS LIST

on the database that LLM_DATABASE_* names. Three steps, each begun by a line on stdin and ended by a
JSON object on stdout with its seconds and this process's CPU seconds: CALLERS store JOBS results
between them, LIST a call; they are claimed and ended as a worker does it, without any work; and both
at the same time, with as many again.
"""

import asyncio
import sys
from uuid import UUID

import uvloop

from app.core.database import Database
from app.core.ids import new_id
from app.core.listener import ENDED, ENQUEUED
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM
from app.queue.job_queue import AttemptEnd, AttemptOutcome, Claim, JobQueue, NewContext, NewResult
from app.worker.lease import Lease
from bench.steps import run_steps

_MODEL = "none"
_RETRY_SECONDS = 5.0


async def main(jobs: int, callers: int, length: int) -> None:
    """Do the steps; somebody hears of what is stored and ended, as the service's processes do."""
    settings = Settings()
    async with Database(settings, "bench") as database:
        queue = JobQueue(database, settings)
        lease = Lease(database, settings.lease_seconds)
        await lease.register()
        worker = _Worker(queue, lease.id, settings.worker_slots)
        listening = await database.connect()
        await listening.add_listener(ENQUEUED, lambda *_: worker.wake.set())
        await listening.add_listener(ENDED, lambda *_: None)

        async def at_once() -> None:
            await asyncio.gather(_store(queue, jobs, callers, length), worker.work(jobs))

        await run_steps(
            [lambda: _store(queue, jobs, callers, length), lambda: worker.work(jobs), at_once]
        )
        await listening.close()


async def _store(queue: JobQueue, jobs: int, callers: int, length: int) -> None:
    async def call() -> None:
        for _ in range(jobs // callers // length):
            if not all(await queue.enqueue([_result() for _ in range(length)])):
                raise RuntimeError("a result was not stored")

    await asyncio.gather(*(call() for _ in range(callers)))


def _result() -> NewResult:
    context = NewContext(new_id(), DEFAULT_TEAM, "a prompt", None, "{}")
    return NewResult(
        id=new_id(),
        team_id=DEFAULT_TEAM,
        context_id=context.id,
        model_name=_MODEL,
        parameters='{"max_tokens": 16}',
        deadline_seconds=3600.0,
        new_context=context,
    )


class _Worker:
    """Claims for its free slots and ends what it claimed, woken as `app.worker.worker` is."""

    def __init__(self, queue: JobQueue, identifier: UUID, slots: int) -> None:
        self.wake = asyncio.Event()
        self._queue = queue
        self._id = identifier
        self._slots = slots
        self._lane = queue.ending_lane(identifier, _RETRY_SECONDS)
        self._running: set[asyncio.Task[None]] = set()
        self._is_short = False  # whether slots were the limit of the last claim
        self._ended = 0

    async def work(self, jobs: int) -> None:
        """Until so many more results have ended."""
        last = self._ended + jobs
        while self._ended < last:
            free = self._slots - len(self._running)
            claimed = 0
            if free:
                async for claims in self._queue.claims(self._id, {_MODEL: free}):
                    claimed += len(claims)
                    for claim in claims:
                        task = asyncio.create_task(self._end(claim))
                        self._running.add(task)
                        task.add_done_callback(self._forget)
            self._is_short = claimed == free
            if self._ended + len(self._running) >= last:
                await asyncio.gather(*self._running)
            else:
                await self.wake.wait()
                self.wake.clear()

    async def _end(self, claim: Claim) -> None:
        done = AttemptEnd(claim.id, claim.attempt, AttemptOutcome.COMPLETED, output="done")
        if not await self._lane.submit(done):
            raise RuntimeError("a result was not ours to end")
        self._ended += 1

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        task.result()
        if self._is_short:
            self.wake.set()


if __name__ == "__main__":
    jobs, callers, length = map(int, sys.argv[1:])
    uvloop.run(main(jobs, callers, length))
