"""Fixtures of schedules: the tests of a file share one database, and one event loop."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from app.core.database import Database
from tests.conftest import make_settings
from tests.database_copies import own_database
from tests.integration.queue.queue_bench import MAX_ATTEMPTS, Bench
from tests.integration.queue.schedules.checks import Schedules, open_schedules
from tests.integration.queue.schedules.scheduler import Process
from tests.postgres import PostgresServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def schedules(postgres_server: PostgresServer, template: str) -> AsyncIterator[Schedules]:
    async with own_database(postgres_server, template) as name:
        settings = make_settings(
            postgres_server, name, max_attempts=MAX_ATTEMPTS, database_timeout_seconds=60.0
        )
        async with Database(settings, "test") as database, open_schedules(database) as schedules:
            yield schedules


@pytest.fixture
def bench(schedules: Schedules) -> Bench:
    return schedules.bench


@pytest.fixture
def process(bench: Bench) -> Process:
    """The parts of a process that does not pause, for what precedes a schedule."""
    return Process(bench.database, bench.settings)
