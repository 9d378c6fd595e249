"""llm-comply, unmodified, as a judge of responses, chat completions and messages."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.conftest import ROOT, SCRIPTED, Service, make_settings, run_triton
from tests.images import RED, png_uri
from tests.integration.client.support import url_of
from tests.integration.inference.test_images import PARTS, VISION
from tests.integration.support import serve, write_model
from tests.postgres import PostgresServer

pytestmark = pytest.mark.trial

PYTHON = ROOT / ".venv-recipes" / "bin" / "python"
SCHEMAS = Path(__file__).with_name("check_by_llm_comply.py")
PAGE = (ROOT / "docs" / "responses.md").read_text()
CHECKS = {"open-responses": 13, "openai-chat": 9, "anthropic": 9}
# As docs/responses.md names them. The tool skips its checks of reasoning unless a model has such a name.
MODELS = {"reasons": "deepseek-r1-claude-opus", "has no vision": "plain"}
CALL = '[{"name": "get_weather", "parameters": {"location": "Rome"} }]'
THOUGHTS = "<think> First 500, then 55. </think> "
TEMPLATE = (
    PARTS + "{{ '{{text=' }}{% if tools %}" + CALL + "{% else %}THOUGHTS It is 555.{% endif %}"
    "{{ '}}' }}"
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    entries = dict.fromkeys(MODELS.values(), SCRIPTED["scripted"])
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("triton"), entries) as server:
        yield server


@pytest.fixture
async def service(
    postgres_server: PostgresServer, database_name: str, both: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    thoughtful, plain = MODELS.values()
    write_model(tmp_path, thoughtful, template=TEMPLATE.replace("THOUGHTS", THOUGHTS))
    (tmp_path / thoughtful / "1" / "config.json").write_text(VISION)
    write_model(tmp_path, plain, template=TEMPLATE.replace("THOUGHTS", ""))
    settings = make_settings(
        postgres_server, database_name, both, model_repository=tmp_path, max_images=1
    )
    async with serve(settings, with_worker=True) as running:
        yield running


async def run(home: Path, *arguments: str | Path, given: object = None) -> Any:
    """The JSON that a program of the tool's environment writes."""
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-W", "ignore", *arguments,
        cwd=home, env={"PATH": os.environ["PATH"], "HOME": str(home)},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate(json.dumps(given).encode())
    assert output, errors.decode()
    return json.loads(output)


def documented() -> set[tuple[str, str, str]]:
    """Model, check and finding of each row in the document's table."""
    rows = PAGE.partition("| model | check |")[2].partition("\n\n")[0].splitlines()[2:]
    found = set()
    for row in rows:
        kind, checks, findings, _ = (cell.strip() for cell in row.strip("|").split("|"))
        models = MODELS.values() if kind == "any" else [MODELS[kind]]
        named = (re.findall("`([^`]+)`", cell) for cell in (checks, findings))
        found |= set(product(models, *named))
    return found


def findings_of(result: dict[str, Any]) -> list[str]:
    if result["status"] == "skipped":
        return []
    errors: list[str] = result.get("errors", [])
    refused = [error for error in errors if error.startswith("HTTP ")]
    return refused or errors + result.get("warnings", [])  # the others follow from a refusal


async def test_remaining_findings_are_those_of_the_document(
    service: Service, tmp_path: Path
) -> None:
    found = set()
    for (kind, model), (form, count) in product(MODELS.items(), CHECKS.items()):
        results = (await run(
            tmp_path, "-m", "llm_comply.cli", "--json", "--format", form, "--model", model,
            "--base-url", f"{url_of(service)}/v1", "--api-key", "none",
        ))["results"]  # fmt: skip
        assert len(results) == count
        assert kind != "reasons" or all(one["status"] != "skipped" for one in results)
        found |= {(model, one["id"], finding) for one in results for finding in findings_of(one)}
    assert found == documented()


RUN: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
# Its arguments may be of any type: the scripted model writes a list of calls.
FREE: Any = RUN | {"parameters": {"title": "any"}}
CALLED: Any = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
REQUESTS: list[dict[str, Any]] = [
    {},
    {"max_output_tokens": 2},
    {"top_logprobs": 2, "temperature": 0.5, "presence_penalty": 1.0},
    {"tools": [RUN], "tool_choice": "required"},
    {"tools": [FREE], "tool_choice": {"type": "function", "name": "get_weather"}},
    {"reasoning": {"effort": "high", "summary": "auto"}, "text": {"format": {"type": "text"}}},
]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": png_uri(RED)}]},
    {"role": "assistant", "content": "y"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "z"}]},
    CALLED,
    {"type": "function_call_output", "call_id": "a", "output": "rain"},
    {"role": "user", "content": "and?"},
]


def events_in(text: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def responses_of(service: Service, model: str) -> list[list[Any]]:
    """Responses, those read again, their events then and now, and those that fail or are cancelled."""
    client, path, given = service.client, "/v1/responses", []
    for members in REQUESTS:
        asked = {"model": model, "input": "hi"} | members
        made = (await client.post(path, json=asked)).json()
        one = f"{path}/{made['id']}"
        streamed = await client.post(path, json=asked | {"stream": True})
        read_again = await client.get(one, params={"stream": "true"})
        events = events_in(streamed.text) + events_in(read_again.text)
        given += [["openresponses", "event", event] for event in events]
        answers = [made, (await client.get(one)).json()]
        begun = (await client.post(path, json=asked | {"background": True})).json()
        answers += [begun, (await client.post(f"{path}/{begun['id']}/cancel")).json()]
        given += [["openresponses", "ResponseResource", answer] for answer in answers]
    refused = {"model": model, "input": "{{refuse}}", "stream": True}
    failed = events_in((await client.post(path, json=refused)).text)
    assert failed[-1]["type"] == "response.failed"
    return given + [["openresponses", "event", event] for event in failed]


MESSAGES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 2},
    {"stop_sequences": ["is"]},
    {
        "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    },
]
EVENTS = {
    "message_start": "MessageStartEvent",
    "content_block_start": "ContentBlockStartEvent",
    "content_block_delta": "ContentBlockDeltaEvent",
    "content_block_stop": "ContentBlockStopEvent",
    "message_delta": "MessageDeltaEvent",
    "message_stop": "MessageStopEvent",
}


async def messages_of(service: Service, model: str) -> list[list[Any]]:
    """Messages and their events, and those whose conversation has the message's own content."""
    given = []
    for members in MESSAGES:
        turns = [{"role": "user", "content": "hi"}]
        asked = {"model": model, "max_tokens": 100, "messages": turns} | members
        made = (await service.client.post("/v1/messages", json=asked)).json()
        turns += [{"role": "assistant", "content": made["content"]}, *turns]
        again = (await service.client.post("/v1/messages", json=asked | {"messages": turns})).json()
        given += [["anthropic", "Message", made], ["anthropic", "Message", again]]
        streamed = await service.client.post("/v1/messages", json=asked | {"stream": True})
        events = [event for event in events_in(streamed.text) if event["type"] != "ping"]
        assert events[-1]["type"] == "message_stop"
        given += [["anthropic", EVENTS[event["type"]], event] for event in events]
    return given


async def test_answers_read_again_and_all_events_have_their_schemas(
    service: Service, tmp_path: Path
) -> None:
    given = []
    for model in MODELS.values():
        given += await responses_of(service, model) + await messages_of(service, model)
    asked = {"model": MODELS["reasons"], "input": ITEMS}
    made = (await service.client.post("/v1/responses", json=asked)).json()
    items = (await service.client.get(f"/v1/responses/{made['id']}/input_items")).json()["data"]
    assert len(items) == len(ITEMS)
    given += [["openresponses", "ItemField", item] for item in items]
    headers = {"anthropic-version": "2023-06-01"}
    models = (await service.client.get("/v1/models", headers=headers)).json()["data"]
    given += [["anthropic", "ModelInfo", one] for one in models]
    found = {(name, message) for name, message in await run(tmp_path, SCHEMAS, given=given)}
    named = {finding.partition(": ")[2]: finding for _, _, finding in documented()}
    assert found == {item for item in named.items() if item[0].startswith("response.reasoning_")}
