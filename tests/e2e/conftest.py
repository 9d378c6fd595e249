"""Real vLLM engines behind real Tritons, once a session: the demo model's, and those of tiny models."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.settings import Settings
from tests.chaos.stack import MortalTriton
from tests.conftest import ROOT, Service, make_settings, run_service, run_triton
from tests.e2e.small_models import ADAPTERS, SmallModels, make_models, write_entries
from tests.e2e.vllm_server import run_vllm_server
from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTriton]:
    """Triton with the demo model on vLLM's CPU engine: about 20 seconds to start."""
    models = {"demo": ROOT / "models" / "demo"}
    with run_triton(MortalTriton, tmp_path_factory.mktemp("vllm"), models) as server:
        yield server


@pytest.fixture
async def vllm_triton(vllm_server: MortalTriton) -> MortalTriton:
    """The session's Triton, started again if the test before killed it."""
    async with vllm_server.client() as client:
        is_live = await client.is_live()
    if not is_live:
        await vllm_server.start()
    return vllm_server


@pytest.fixture
def vllm_settings(
    postgres_server: PostgresServer, database_name: str, vllm_triton: MortalTriton
) -> Settings:
    """Settings of a service in front of the vLLM engine."""
    return make_settings(
        postgres_server,
        database_name,
        vllm_triton,
        model_repository=ROOT / "models",
        lease_seconds=30.0,  # the engine takes the cores: the worker may wait for its turn
    )


@pytest.fixture
async def vllm_service(vllm_settings: Settings) -> AsyncIterator[Service]:
    """API and worker in this process, in front of the vLLM engine."""
    async with run_service(vllm_settings, with_worker=True) as running:
        yield running


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own HTTP server with the demo model."""
    with run_vllm_server(tmp_path_factory.mktemp("vllm_server")) as url:
        yield url


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, adapters, and what transformers computes with them."""
    directory = tmp_path_factory.mktemp("made")
    make_models(directory)
    return directory


@pytest.fixture(scope="session")
def computed(made: Path) -> dict[str, Any]:
    """The numbers of make_models.py."""
    found: dict[str, Any] = json.loads((made / "expected.json").read_text())
    assert len({tuple(tokens) for tokens in found["adapters"].values()}) == 1 + len(ADAPTERS)
    return found


@pytest.fixture(scope="session")
def entries(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model repository with an entry for each tiny model."""
    return write_entries(made, tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallModels]:
    """Triton for the tiny models: none of them is loaded yet."""
    with run_triton(SmallModels, tmp_path_factory.mktemp("small"), {}) as server:
        yield server


@pytest.fixture(scope="session")
def tools_server(small_models: SmallModels, entries: dict[str, Path]) -> Iterator[SmallModels]:
    """The tiny model that takes tools, with adapters."""
    with small_models.serving(entries, "tools"):
        yield small_models


@pytest.fixture
async def tools_triton(tools_server: SmallModels) -> SmallModels:
    await tools_server.revive()
    return tools_server


@pytest.fixture
def tools_settings(
    postgres_server: PostgresServer, database_name: str, tools_triton: SmallModels
) -> Settings:
    """A service in front of that model."""
    return make_settings(
        postgres_server, database_name, tools_triton, model_repository=tools_triton.repository
    )
