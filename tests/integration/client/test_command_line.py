"""The command `llm-api` as a program, against the service."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.conftest import ROOT, Service
from tests.integration.client.support import url_of
from tests.integration.support import finish, send, serve, until_running


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


async def run(service: Service, home: Path, *words: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command; its exit status, output and messages."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LLM_")},
        "LLM_API_URL": url_of(service), "XDG_CONFIG_HOME": str(home), "PYTHONPATH": str(ROOT / "client"),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llm_api_client", *words, env=environment, cwd=home,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, messages = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, output.decode(), messages.decode()


@pytest.mark.trial
async def test_a_session(one: Service, tmp_path: Path) -> None:
    status, output, _ = await run(one, tmp_path, "login", stdin="\n")
    assert status == 0
    status, sent, _ = await run(one, tmp_path, "send", "--max-tokens", "9", stdin="{{text=a 漢字}}")
    assert status == 0
    result_id = sent.strip()
    assert (await run(one, tmp_path, "follow", result_id))[:2] == (0, "a 漢字\n")
    assert (await run(one, tmp_path, "get", result_id))[:2] == (0, "a 漢字\n")
    status, output, _ = await run(one, tmp_path, "retry", result_id, "--follow", "--json")
    assert (status, json.loads(output)["retry_of"]) == (0, result_id)
    status, output, _ = await run(one, tmp_path, "list")
    assert len(output.splitlines()) == 3
    await finish(one, "{{chunks=1}}", metadata={"run": "a=b", "n": 1})
    pairs = ["--metadata", "run=a=b", "--metadata"]
    for last, lines in (("n=1", 2), ("n=2", 1)):
        status, output, _ = await run(one, tmp_path, "list", *pairs, last)
        assert (status, len(output.splitlines())) == (0, lines)
    status, output, _ = await run(one, tmp_path, "models")
    assert output.splitlines()[1].split()[:2] == ["scripted", "ready"]
    status, output, _ = await run(one, tmp_path, "compare", "{{text=b}}", "-m", "scripted")
    assert (status, output.splitlines()[1:]) == (0, ["b"])


@pytest.mark.trial
async def test_failures_have_a_status_and_a_message(one: Service, tmp_path: Path) -> None:
    sent = await send(one, "{{chunks=90000 delay_ms=20}}", parameters={"max_tokens": 90_000})
    await until_running(one, sent["id"])
    following = asyncio.create_task(run(one, tmp_path, "follow", sent["id"]))
    status, output, _ = await run(one, tmp_path, "cancel", sent["id"])
    assert status == 0
    status, output, messages = await following
    assert status == 1
    assert messages.startswith("cancelled: ")
    status, output, messages = await run(one, tmp_path, "send", "x", "-m", "none")
    assert (status, output) == (3, "")
    assert "unknown_model (404)" in messages
    await finish(one, "x")
    address = ["--url", "http://127.0.0.1:9", "--patience", "0"]
    status, _, messages = await run(one, tmp_path, *address, "models")
    assert status == 4
    assert "LLM_API_URL" in messages


@pytest.mark.trial
async def test_a_file_is_mapped(one: Service, tmp_path: Path) -> None:
    table = "topic,id\n" + "".join(f"t{i},k{i}\n" for i in range(300)) + "torn\n"
    (tmp_path / "rows.csv").write_text(table)
    words = ["map", "rows.csv", "--prompt-template", "{{{{text={topic}}}}}", "--key", "id"]
    status, output, messages = await run(one, tmp_path, *words, "--out", "answers.jsonl")
    assert (status, messages.splitlines()[-1]) == (1, "1 rows have no answer.")
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_bytes().splitlines()]
    assert {one["key"]: one["text"] for one in answers} == {f"k{i}": f"t{i}" for i in range(300)}
    job_id = messages.split()[1]
    assert output.splitlines()[1].split()[:3] == [job_id, "ended", "300"]
    status, output, _ = await run(one, tmp_path, *words)
    assert len(output.splitlines()) == 301
    status, output, _ = await run(one, tmp_path, "job", job_id, "--rows", "--json")
    assert (status, len(output.splitlines())) == (0, 300)
    status, output, _ = await run(one, tmp_path, "job", "--json")
    assert [json.loads(line)["id"] for line in output.splitlines()] == [job_id]
    status, output, messages = await run(one, tmp_path, "job", job_id, "--retry-failed")
    assert messages.startswith("0 rows are sent again")


@pytest.mark.trial
async def test_equal_rows_are_reused(one: Service, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id\na\nb\n")
    words = ["map", "rows.csv", "-t", "x {id}", "--temperature", "0", "--max-tokens", "5"]
    for name in ("first", "second"):
        status, _, messages = await run(one, tmp_path, *words, "--reuse", "--name", name)
        assert status == 0, messages
    answer = await one.client.get("/results/", params={"limit": 4})
    newest = answer.json()
    assert {row["reused_from"] for row in newest[:2]} == {row["id"] for row in newest[2:]}
