"""The programs of docs/recipes.md, run as they are printed, with their unmodified libraries on real vLLM."""

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from app.core.settings import Settings
from tests.conftest import ROOT, Service, connect
from tests.integration.client.support import url_of
from tests.integration.support import serve
from tests.postgres import PostgresServer

pytestmark = pytest.mark.timeout(300)

PYTHON = ROOT / ".venv-recipes" / "bin" / "python"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
PRINTED_URL = "http://127.0.0.1:8887"
SECTIONS = dict(
    section.split("\n", 1) for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
)
PROGRAMS = {
    title: section.split("```python\n")[1].split("```")[0]
    for title, section in SECTIONS.items()
    if "```python\n" in section
}
# Results that a program leaves: what libraries send on the quiet would show here.
RESULTS = {
    "openai": 1,
    "LangChain": 3,
    "LlamaIndex": 2,
    "DSPy": 1,
    "Instructor": 1,
    "PydanticAI": 1,
    "Inspect": 2,
    "Hugging Face datasets": 2,
    "DBOS": 2,
    "Cohere": 3,
}
# Models of the page, as the tests' servers name them.
MODELS = {"bge-reranker-base": "rank"}
OF_THEIR_OWN = {"openai", "DBOS", "Cohere"}  # tests; Cohere's is in test_embeddings.py


@pytest.fixture
async def port(vllm_settings: Settings) -> AsyncIterator[Service]:
    """The service behind a real port, in front of the vLLM engine."""
    async with serve(vllm_settings, with_worker=True) as service:
        yield service


async def run(service: Service, title: str, home: Path, **environment: str) -> str:
    """Run a program of the page in a home of its own; return its output."""
    program = PROGRAMS[title].replace(PRINTED_URL, url_of(service))
    for printed, served in MODELS.items():
        program = program.replace(f'"{printed}"', f'"{served}"')
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-c", program,
        cwd=home,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(ROOT / "client"),
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            **environment,
        },
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, f"{title}: {errors.decode()}"
    assert output.strip(), title
    return output.decode()


async def count_results(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval("SELECT count(*) FROM results WHERE state = 'completed'"))


def test_each_library_of_the_page_has_a_test() -> None:
    assert set(PROGRAMS) == set(RESULTS)
    assert set(SECTIONS) == set(RESULTS) | {"Open WebUI"}


@pytest.fixture
async def results(vllm_settings: Settings) -> AsyncIterator[asyncpg.Connection]:
    """A connection to the service's database."""
    connection = await connect(vllm_settings)
    yield connection
    await connection.close()


@pytest.mark.parametrize("title", [title for title in RESULTS if title not in OF_THEIR_OWN])
async def test_program_leaves_its_results(
    title: str, port: Service, results: asyncpg.Connection, tmp_path: Path
) -> None:
    await run(port, title, tmp_path)
    assert await count_results(results) == RESULTS[title]


async def test_second_run_with_keys_of_the_contents_generates_nothing(
    port: Service, results: asyncpg.Connection, tmp_path: Path
) -> None:
    first = await run(port, "openai", tmp_path)
    assert await run(port, "openai", tmp_path) == first
    assert await count_results(results) == RESULTS["openai"]


async def test_workflow_whose_record_is_lost_finds_its_results(
    port: Service, results: asyncpg.Connection, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """DBOS runs all steps again in an empty database; their keys are those of the first run."""
    server, texts = postgres_server, []
    address = f"postgresql://{server.user}:{server.password}@{server.host}:{server.port}"
    for number in range(2):
        name = f"test_dbos_{number}_{secrets.token_hex(6)}"
        url = f"{address}/{name}"
        texts.append(await run(port, "DBOS", tmp_path, DBOS_SYSTEM_DATABASE_URL=url))
        await server.execute(f"DROP DATABASE {name} WITH (FORCE)")
    assert texts[0] == texts[1]
    assert await count_results(results) == RESULTS["DBOS"]
