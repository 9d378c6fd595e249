"""pgqueuer alone: jobs that do nothing, stored and run. The peer of `bench.queue_part`.

    .venv-peers/bin/python -m bench.pgqueuer_part JOBS CALLERS LIST BATCH

on the empty database that PG* names, in the same steps. As its guide recommends: its settings of
autovacuum, a pool for the producers, a single connection for the worker, which takes BATCH at a time.
"""

import asyncio
import sys

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.steps import run_steps

_ENTRYPOINT = "nothing"
_POOL = 20


async def main(jobs: int, callers: int, length: int, batch: int) -> None:
    """Do the steps."""
    connection = await asyncpg.connect()
    own = Queries(AsyncpgDriver(connection))
    await own.install()
    await own.optimize_autovacuum()
    async with asyncpg.create_pool(min_size=5, max_size=_POOL) as pool:
        queries = Queries(AsyncpgPoolDriver(pool))

        async def at_once() -> None:
            await asyncio.gather(_store(queries, jobs, callers, length), _work(jobs, batch))

        await run_steps(
            [lambda: _store(queries, jobs, callers, length), lambda: _work(jobs, batch), at_once]
        )
    if await own.queue_size():
        raise RuntimeError("jobs are left")


async def _store(queries: Queries, jobs: int, callers: int, length: int) -> None:
    async def call() -> None:
        for _ in range(jobs // callers // length):
            if length == 1:
                await queries.enqueue(_ENTRYPOINT, b"a prompt")
            else:
                await queries.enqueue([_ENTRYPOINT] * length, [b"a prompt"] * length, [0] * length)

    await asyncio.gather(*(call() for _ in range(callers)))


async def _work(jobs: int, batch: int) -> None:
    connection = await asyncpg.connect()
    queuer = PgQueuer(AsyncpgDriver(connection))
    done = 0

    @queuer.entrypoint(_ENTRYPOINT)  # type: ignore[untyped-decorator]
    async def nothing(_: Job) -> None:
        nonlocal done
        done += 1
        if done == jobs:
            queuer.shutdown.set()

    await queuer.run(batch_size=batch)
    await connection.close()


if __name__ == "__main__":
    jobs, callers, length, batch = map(int, sys.argv[1:])
    uvloop.run(main(jobs, callers, length, batch))
