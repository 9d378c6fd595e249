"""The demo from prompt to corpus: the demo model's output occurs in its training data."""

import asyncio
import re
import shutil
import sys
from pathlib import Path

import pytest

from app.cli.up import demo_index
from app.cli.up.progress import Progress
from app.core.settings import Settings
from tests.attribution_workers import attribution_worker
from tests.conftest import ROOT
from tests.integration.support import serve

pytestmark = [
    pytest.mark.timeout(300),  # the index is built first
    pytest.mark.skipif(
        not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq"
    ),
]


async def run_quick_start(api: str) -> str:
    """Output of the first calls of docs/infini_gram.md."""
    text = (ROOT / "docs" / "infini_gram.md").read_text()
    block = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0]
    assert "/demo/count" in block
    process = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-euc", block.replace("http://127.0.0.1:8887", api)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()


async def test_a_result_is_attributed_to_what_the_model_read(
    vllm_settings: Settings, tmp_path: Path
) -> None:
    async with Progress(sys.stdout) as progress:
        declarations = await demo_index.prepare(tmp_path, progress)
    assert declarations is not None
    settings = vllm_settings.model_copy(update={"indexes_file": declarations})
    async with (
        serve(settings, with_worker=True) as service,
        attribution_worker(settings, tmp_path / "worker.log", demo_index.NAME),
    ):
        sent = await service.client.post(
            "/results/",
            json={
                "model": "demo",
                "content": "import ",
                "parameters": {"max_tokens": 60, "temperature": 0},
                "attribute": {"index": "demo", "maximumFrequency": 100},
            },
            headers={"Prefer": "wait=60"},
        )
        source = sent.json()
        assert source["state"] == "completed", source
        url = f"/results/{source['attribution']['id']}"
        result = (await service.client.get(url, params={"wait": 60})).json()
        reported_at = await run_quick_start(str(service.client.base_url).rstrip("/"))
    assert reported_at.count('"count":') >= 2
    assert reported_at.count('.py"') >= 2
    assert (result["state"], result["source_id"]) == ("completed", source["id"])
    attribution = result["result"]
    assert "".join(attribution["inputTokens"]) == source["result"]
    assert attribution["spans"]
    for span in attribution["spans"]:
        assert span["text"] in source["result"]
        assert 0 < span["count"] <= 100
        for document in span["documents"]:
            assert span["text"] in document["text"]
            assert span["text"] in document["textSnippet"]
