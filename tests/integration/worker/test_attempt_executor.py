"""The attempts of one worker id against the rows of the database."""

import asyncio
from typing import cast
from uuid import UUID

import asyncpg

from app.core.database import statement_seconds
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Backend
from app.worker.attempt_executor import AttemptExecutor
from app.worker.throughput import Throughput
from tests.conftest import Service, connect, run_service
from tests.integration.support import finish, read, send, until

_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%result_chunks%'
"""


def executor_of(api: Service, worker_id: UUID) -> AttemptExecutor:
    """An executor without a backend: none of its results may run."""
    return AttemptExecutor(
        worker_id,
        api.services.queue,
        cast(Backend, None),
        api.services.hub,
        cast(StreamInterest, frozenset()),
        Throughput(),
        api.services.settings,
        lambda _: None,
    )


async def test_a_claim_under_way_is_not_handed_back(
    api: Service, connection: asyncpg.Connection
) -> None:
    """Its row names the worker before the claim's answer arrives, and heartbeats may come at once.

    A row that no answer follows for as long as a statement may take is of a lost one.
    """
    worker_id = new_id()
    await connection.execute(
        "INSERT INTO workers (id, host, pid, lease_expires_at) VALUES ($1, 'h', 1, now() + '1 h')",
        worker_id,
    )
    await send(api, "x")
    await connection.execute(
        "UPDATE results SET worker_id = $1, attempt = 1, started_at = now()", worker_id
    )
    executor = executor_of(api, worker_id)
    assert executor._statement_seconds == statement_seconds(api.services.settings)
    for owner, seconds in ((worker_id, 60.0), (worker_id, 60.0), (None, 0.0)):
        executor._statement_seconds = seconds
        await executor.check_owned(connection)
        await asyncio.gather(*executor.tasks)
        assert await connection.fetchval("SELECT worker_id FROM results") == owner


async def test_the_end_of_a_result_follows_a_slow_write_of_its_text(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """An end sent meanwhile could not see the chunk, and would leave it."""
    other = await connect(settings)
    settings = settings.model_copy(update={"flush_seconds": 0.05})
    async with run_service(settings, with_worker=True) as service:
        hub = service.services.hub
        accepted = await send(service, "x {{chunks=30 delay_ms=40}}")
        result_id = UUID(accepted["id"])
        await until(lambda: asyncio.sleep(0, hub.running(result_id)))
        async with other.transaction():
            await other.execute("SELECT FROM results FOR NO KEY UPDATE")
            await until(lambda: connection.fetchval(_WAITING))
            attempt = hub.running(result_id)
            assert attempt is not None
            await until(lambda: asyncio.sleep(0, attempt.is_over))
            # The end of a later result is committed: a wrong end would have been sent before it.
            assert (await finish(service, "y {{chunks=1}}"))["state"] == "completed"
        result = await read(service, accepted["id"], wait=30)
    await other.close()
    assert result["state"] == "completed"
    assert await connection.fetchval("SELECT count(*) FROM result_chunks") == 0
