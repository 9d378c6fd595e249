"""The client's MCP server, started and called by the official client as agents do."""

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.types import TextContent

from app.core.settings import Settings
from tests.conftest import ROOT, Service
from tests.integration.client.support import url_of
from tests.integration.support import serve


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


def started(service: Service, home: Path) -> Client:
    """A client of the program `llm-api mcp`."""
    environment = {
        "LLM_API_URL": url_of(service), "XDG_CONFIG_HOME": str(home), "PYTHONPATH": str(ROOT / "client"),
        "PATH": os.environ["PATH"],
    }  # fmt: skip
    command = ["-m", "llm_api_client", "--patience", "0", "mcp"]
    return Client(StdioServerParameters(command=sys.executable, args=command, env=environment))


async def call(agent: Client, tool: str, **arguments: Any) -> Any:
    """The answer of a tool; the text of its error."""
    answer = await agent.call_tool(tool, arguments)
    texts = [part.text for part in answer.content if isinstance(part, TextContent)]
    if answer.is_error:
        return texts[0]
    return [json.loads(text) for text in texts]


@pytest.mark.trial
async def test_an_agent_uses_the_tools(one: Service, tmp_path: Path) -> None:
    async with started(one, tmp_path) as agent:
        tools = (await agent.list_tools()).tools
        assert [tool.name for tool in tools] == ["send", "wait", "search", "attribute", "models"]
        assert all(tool.description for tool in tools)
        (models,) = await call(agent, "models")
        assert models["models"][0]["name"] == "scripted"
        (sent,) = await call(
            agent,
            "send",
            prompt="{{text=unmistakable}}",
            model="scripted",
            idempotency_key="step-1",
        )
        (again,) = await call(
            agent,
            "send",
            prompt="{{text=unmistakable}}",
            model="scripted",
            idempotency_key="step-1",
        )
        assert again["id"] == sent["id"]
        (done,) = await call(agent, "wait", id=sent["id"])
        assert (done["state"], done["text"]) == ("completed", "unmistakable")
        (endless,) = await call(
            agent, "send", prompt="{{chunks=900 delay_ms=50}}", model="scripted", max_tokens=900
        )
        reports: list[tuple[float, float | None]] = []

        async def note(progress: float, total: float | None, message: str | None) -> None:
            reports.append((progress, total))

        answer = await agent.call_tool(
            "wait", {"id": endless["id"], "seconds": 0.1}, progress_callback=note
        )
        (part,) = answer.content
        assert isinstance(part, TextContent)
        assert json.loads(part.text)["state"] == "pending"
        assert reports[-1] == (0.1, 0.1)
        (wait,) = (tool for tool in tools if tool.name == "wait")
        assert (
            wait.input_schema["properties"]["seconds"]["default"] < 60
        )  # what clients wait for an answer
        assert wait.input_schema["properties"].keys() == {"id", "seconds"}
        while not (found := await call(agent, "search", words="unmistakable")):
            pass
        assert found[0]["id"] == sent["id"]
        assert "unknown_model" in await call(agent, "send", prompt="x", model="none")
        assert "unknown_index" in await call(agent, "attribute", text="x", index="none")
