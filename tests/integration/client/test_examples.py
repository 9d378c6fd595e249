"""The client's examples in the documents, run as they are printed there."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.conftest import ROOT, Service
from tests.integration.client.support import url_of
from tests.integration.support import serve

pytestmark = pytest.mark.trial  # programs of the documents, in processes of their own

PAGES = ("README.md", "client/README.md", "docs/client.md")


def examples() -> list[str]:
    """The Python programs that use the client, with the scripted model."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        found += [
            block.replace("demo", "scripted") for block in blocks if "llm_api_client" in block
        ]
    return found


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


async def test_each_example_runs(one: Service, tmp_path: Path) -> None:
    programs = examples()
    assert len(programs) >= 4
    environment = os.environ | {
        "LLM_API_URL": url_of(one),
        "XDG_CONFIG_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT / "client"),
    }
    for number, program in enumerate(programs):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", program, env=environment, cwd=folder,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b""), program
        assert output
