"""lm-evaluation-harness, unmodified and offline: its scores are those from vLLM's own server."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.core.settings import Settings
from tests.conftest import ROOT, Service
from tests.integration.client.support import url_of
from tests.integration.support import serve

pytestmark = pytest.mark.timeout(300)

PYTHON = ROOT / ".venv-recipes" / "bin" / "python"
QUESTIONS = [
    {"code": "def add(a, b):\n    return a", "choices": [" + b", " banana", ".join"], "answer": 0},
    {"code": "import", "choices": [" os", " (", "\u00e9"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{code}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
GENERATE = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
async def port(vllm_settings: Settings) -> AsyncIterator[Service]:
    """The service behind a real port, in front of the vLLM engine."""
    async with serve(vllm_settings, with_worker=True) as service:
        yield service


async def evaluate(model: str, url: str, task: str, home: Path, *options: str) -> list[Any]:
    """Run the harness; return the responses to each question."""
    data = home / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, rest in (("choice", CHOICE), ("generate", GENERATE)):
        (home / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)
    arguments = {
        "model": "demo",
        "base_url": url,
        "tokenizer": ROOT / "models" / "demo" / "1",
        "tokenizer_backend": "huggingface",
        "num_concurrent": 1,
        "max_retries": 1,
    }
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "lm_eval", "--model", model, "--tasks", task, "--include_path", home,
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--output_path", home / "out", "--log_samples", *options,
        cwd=home,
        env={
            "PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": "none",
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        },
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    (samples,) = (home / "out").rglob(f"samples_{task}_*.jsonl")
    lines = map(json.loads, samples.read_text().splitlines())
    return [one["resps"] for one in sorted(lines, key=lambda one: int(one["doc_id"]))]


async def test_loglikelihoods_are_those_of_vllms_server(
    port: Service, vllm_url: str, tmp_path: Path
) -> None:
    scores = []
    for name, url in (("ours", url_of(port)), ("theirs", vllm_url)):
        home = tmp_path / name
        home.mkdir()
        completions = f"{url}/v1/completions"
        scores.append(await evaluate("local-completions", completions, "choice", home))
    ours, theirs = scores
    assert ours == theirs
    assert [len(choices) for choices in ours] == [3, 3]
    assert all(float(score) < 0 for choices in ours for ((score, _),) in choices)


async def test_chats_are_generated(port: Service, tmp_path: Path) -> None:
    chats = f"{url_of(port)}/v1/chat/completions"
    template = "--apply_chat_template"
    answers = await evaluate("local-chat-completions", chats, "generate", tmp_path, template)
    assert len(answers) == len(QUESTIONS)
    assert all(text for ((text,),) in answers)
