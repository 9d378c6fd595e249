"""The programs of docs/anthropic.md and docs/reuse.md, run as they are printed."""

import asyncio
import json
import re
import sys

import pytest

from tests.conftest import ROOT, Service

pytestmark = pytest.mark.trial  # programs of the documents, in processes of their own


async def run_blocks(service: Service, document: str, language: str, *program: str) -> str:
    """The output of a document's blocks in a language, as one program."""
    text = (ROOT / document).read_text()
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert blocks
    port = service.client.base_url.port
    source = "\n".join(blocks).replace("127.0.0.1:8887", f"127.0.0.1:{port}")
    run = await asyncio.create_subprocess_exec(
        *program, source.replace('"demo"', '"scripted"'),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await run.communicate()
    assert (run.returncode, errors) == (0, b"")
    return output.decode()


async def test_the_programs_for_anthropics_client(calling: Service) -> None:
    output = await run_blocks(calling, "docs/anthropic.md", "python", sys.executable, "-c")
    assert "scripted" in output
    assert [f"n{n} succeeded" for n in range(3)] == output.splitlines()[-3:]


async def test_the_commands_for_messages(calling: Service) -> None:
    output = await run_blocks(calling, "docs/anthropic.md", "sh", "bash", "-ec")
    assert "x-result-id: " in output.lower()
    assert '"type":"message"' in output.replace(" ", "")
    assert '"input_tokens"' in output


async def test_the_programs_that_reuse(calling: Service) -> None:
    first, second = await answers(calling)
    assert "reused" not in first
    assert second["reused"] is True
    assert second["reused_from"] == first["id"]
    assert second["result"] == first["result"]


async def answers(service: Service) -> list[dict[str, object]]:
    """The two answers of the commands: JSON without a line's end between them."""
    output = await run_blocks(service, "docs/reuse.md", "sh", "bash", "-ec")
    decoder, found, place = json.JSONDecoder(), [], 0
    while place < len(output.rstrip()):
        answer, place = decoder.raw_decode(output, place)
        found.append(answer)
    return found


async def test_the_program_of_other_dialects_that_reuses(calling: Service) -> None:
    first, second = [
        await run_blocks(calling, "docs/reuse.md", "python", sys.executable, "-c") for _ in range(2)
    ]
    assert first == second
    rows = (await calling.client.get("/results/")).json()
    assert ["reused" in row for row in rows] == [True, True, False, False]
