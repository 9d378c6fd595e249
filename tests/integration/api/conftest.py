"""A running service for tests that change nothing of it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from app.cli.up.triton import EmbeddedTriton
from tests.conftest import Service
from tests.integration.support import CHAT_TEMPLATE, fresh_database, serve, write_model
from tests.postgres import PostgresServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat_service(
    postgres_server: PostgresServer,
    template: str,
    triton: EmbeddedTriton,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Service]:
    """API and worker behind a real socket, with a chat template and a tokenizer for the scripted model."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "scripted", template=CHAT_TEMPLATE)
    async with (
        fresh_database(postgres_server, template, triton, model_repository=repository) as settings,
        serve(settings, with_worker=True) as service,
    ):
        yield service
