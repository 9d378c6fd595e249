"""Fixtures of the queue's tests."""

from collections.abc import AsyncIterator

import pytest

from app.core.settings import Settings
from tests.conftest import make_settings
from tests.integration.queue.queue_bench import MAX_ATTEMPTS, Bench, open_bench
from tests.postgres import PostgresServer


@pytest.fixture
def queue_settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name, max_attempts=MAX_ATTEMPTS)


@pytest.fixture
async def bench(queue_settings: Settings) -> AsyncIterator[Bench]:
    async with open_bench(queue_settings) as bench:
        yield bench
