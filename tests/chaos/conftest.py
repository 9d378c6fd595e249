"""Servers that tests may kill, and the service as processes of its own before them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.cli.up.postgres import DATABASE, HOST, USER
from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_errors import GenerationError
from tests.chaos.stack import MortalPostgres, MortalTriton, Stack, kept_running, open_stack
from tests.conftest import make_settings, migrate, run_triton
from tests.postgres import PostgresServer

_TEMPLATE = "chaos_template"


@pytest.fixture(scope="session")
def mortal_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalPostgres]:
    """A PostgreSQL that keeps what it committed when it is killed."""
    directory = tmp_path_factory.mktemp("mortal_postgres")
    server = MortalPostgres(directory / "data", directory / "postgres.log")
    asyncio.run(server.start())
    address = _address(server)
    asyncio.run(address.execute(f"CREATE DATABASE {_TEMPLATE}"))
    migrate(make_settings(address, _TEMPLATE))
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def mortal_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTriton]:
    """A tritonserver with the scripted model."""
    with run_triton(MortalTriton, tmp_path_factory.mktemp("mortal_triton")) as server:
        yield server


@pytest.fixture
async def stack(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Stack]:
    """An API on the session's servers; tests start the workers.

    Triton is kept running, as `up` keeps it: 2.51 crashes or hangs now and then when many streams
    break at once, as they do with a killed worker (triton-inference-server/server#8034).
    """
    await _revive(triton)
    async with (
        kept_running(triton) as deaths,
        open_stack(tmp_path, postgres_server, database_name, triton) as running,
    ):
        running.triton_deaths = deaths
        yield running
    await _revive(triton)  # others than chaos tests come next, too


async def _revive(triton: EmbeddedTriton) -> None:
    """Restart Triton if it does not answer: it may have died at the end of another test."""
    try:
        async with triton.client() as client, asyncio.timeout(20):
            async for _ in client.generate("scripted", "{{chunks=1}}", {"max_tokens": 1}):
                pass
    except (GenerationError, TimeoutError):
        await triton.stop()
        await triton.start()


@pytest.fixture
async def mortal_stack(
    mortal_postgres: MortalPostgres, mortal_triton: MortalTriton, tmp_path: Path
) -> AsyncIterator[Stack]:
    """An API on servers that the test may kill; they are all up at its start."""
    address = _address(mortal_postgres)
    name = f"chaos_{secrets.token_hex(6)}"  # goes with the cluster
    await address.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
    await mortal_triton.start()
    async with open_stack(tmp_path, address, name, mortal_triton) as running:
        yield running


def _address(server: MortalPostgres) -> PostgresServer:
    return PostgresServer(HOST, server.port, USER, server.password, DATABASE)
