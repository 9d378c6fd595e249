"""Fixtures of the attacks."""

from collections.abc import AsyncIterator

import pytest

from tests.conftest import make_settings
from tests.integration.queue.queue_bench import Bench, open_bench
from tests.postgres import PostgresServer


@pytest.fixture
async def bench(postgres_server: PostgresServer, database_name: str) -> AsyncIterator[Bench]:
    async with open_bench(make_settings(postgres_server, database_name)) as bench:
        yield bench
