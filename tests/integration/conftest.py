"""Fixtures of the integration tests alone."""

import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, make_settings
from tests.integration.support import CHAT_TEMPLATE, TOOL_TEMPLATE, serve, write_model
from tests.postgres import PostgresServer


@pytest.fixture
def collect_broken_sockets() -> Iterator[None]:
    """Collect, before the next test, what a test left that breaks connections on purpose."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
async def chatting(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    """A service behind a socket, whose scripted model has a chat template."""
    write_model(tmp_path, "scripted", template=CHAT_TEMPLATE, max_model_len=100_000)
    settings = make_settings(postgres_server, database_name, triton, model_repository=tmp_path)
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.fixture
def tool_settings(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> Settings:
    """Settings of a service whose scripted model has a chat template that takes tools."""
    write_model(tmp_path, "scripted", template=TOOL_TEMPLATE, max_model_len=100_000)
    return make_settings(
        postgres_server, database_name, triton, model_repository=tmp_path, max_attempts=2
    )


@pytest.fixture
async def calling(tool_settings: Settings) -> AsyncIterator[Service]:
    """A service with those settings, behind a socket."""
    async with serve(tool_settings, with_worker=True) as service:
        yield service
