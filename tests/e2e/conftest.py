"""A real vLLM engine behind a real Triton, once a session."""

import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from app.inference.model_repository import parse_source, write_entry
from tests.conftest import ROOT, TRITON_VENV, Service, make_settings, run_service, run_triton
from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """Triton with the demo model on vLLM's CPU engine: about 20 seconds to start."""
    models = {"demo": ROOT / "models" / "demo"}
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("vllm"), models) as server:
        yield server


@pytest.fixture
async def vllm_triton(vllm_server: EmbeddedTriton) -> EmbeddedTriton:
    """The session's Triton, started again if the test before killed it."""
    async with vllm_server.client() as client:
        is_live = await client.is_live()
    if not is_live:
        await vllm_server.start()
    return vllm_server


@pytest.fixture
def vllm_settings(
    postgres_server: PostgresServer, database_name: str, vllm_triton: EmbeddedTriton
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


QUANTIZATIONS = {"llama-int8": "compressed-tensors"}


@pytest.fixture(scope="session")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model repository with an entry for each tiny model."""
    weights = tmp_path_factory.mktemp("weights")
    maker = Path(__file__).with_name("make_tiny_models.py")
    subprocess.run([TRITON_VENV / "bin" / "python", "-I", maker, weights], check=True)
    repository = tmp_path_factory.mktemp("repository")
    made = {}
    for directory in sorted(weights.iterdir()):
        source = parse_source(str(directory))
        assert source.directory is not None
        made[source.name] = repository / source.name
        write_entry(
            made[source.name], source.directory, quantization=QUANTIZATIONS.get(source.name)
        )
    return made


@pytest.fixture(scope="module")
def tools_triton(
    entries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedTriton]:
    """Triton with the tiny model that takes tools."""
    models = {"tools": entries["tools"]}
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("tools"), models) as server:
        yield server


@pytest.fixture
def tools_settings(
    postgres_server: PostgresServer, database_name: str, tools_triton: EmbeddedTriton
) -> Settings:
    """A service in front of that model."""
    repository = tools_triton.environment["LLM_MODEL_REPOSITORY"]
    return make_settings(postgres_server, database_name, tools_triton, model_repository=repository)


def engines() -> list[psutil.Process]:
    """The vLLM engine processes below this session's Triton."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("EngineCore" in word for word in process.cmdline()):
                found.append(process)
    return found
