"""Requests as coding agents send them: tools in their forms, and sessions that run to their end."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import httpx
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, make_settings
from tests.images import RED, block, chat_part, input_part, png_uri
from tests.integration.inference.test_images import VISION
from tests.integration.support import (
    TOOL_TEMPLATE,
    assert_anthropic_error,
    assert_openai_error,
    openai_client,
    serve,
    write_model,
)
from tests.postgres import PostgresServer

PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
CRM: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
RUN: Any = {"type": "function", "name": "run", "parameters": SCHEMA}


def call_of(tool: str, /, **arguments: object) -> str:
    """A call as the scripted model writes it: a directive ends at two closing braces."""
    text = json.dumps({"name": tool, "arguments": arguments}).replace("}}", "} }")
    return f"<tool_call> {text} </tool_call>"


PATCHED = "*** Begin Patch\n+a"
CUSTOM_CALL = f"{{{{text={call_of('apply_patch', input=PATCHED)}}}}}"
CRM_CALL = f"{{{{text={call_of('crm__find', name='Ann')}}}}}"


async def test_a_custom_tool_and_a_namespace_of_responses(calling: Service) -> None:
    async with openai_client(calling) as client:
        for script, kind, member, expected in (
            (CUSTOM_CALL, "custom_tool_call", "input", PATCHED),
            (CRM_CALL, "function_call", "arguments", '{"name": "Ann"}'),
        ):
            asked: Any = {"model": "scripted", "input": script, "tools": [PATCH, CRM]}
            made = await client.responses.create(**asked)
            (item,) = made.output
            assert (item.type, getattr(item, member)) == (kind, expected)
            name = ("apply_patch", None) if member == "input" else ("find", "crm")
            assert (item.name, getattr(item, "namespace", None)) == name
            assert [tool.type for tool in made.tools] == ["custom", "namespace"]
            assert (await client.responses.retrieve(made.id)).output == made.output
            events = [one async for one in await client.responses.create(**asked, stream=True)]
            event = f"response.{'custom_tool_call_input' if member == 'input' else 'function_call_arguments'}"
            assert [one.type for one in events[-5:]] == [
                "response.output_item.added",
                f"{event}.delta",
                f"{event}.done",
                "response.output_item.done",
                "response.completed",
            ]
            assert getattr(events[-3], member) == events[-4].delta == expected
            output: Any = {"type": f"{kind}_output", "call_id": item.call_id, "output": "Done"}
            go_on: Any = {"model": "scripted", "tools": [PATCH, CRM], "max_output_tokens": 1}
            after = await client.responses.create(
                **go_on, previous_response_id=made.id, input=[output]
            )
            whole = await client.responses.create(
                **go_on,
                input=[{"role": "user", "content": script}, *[one.to_dict() for one in made.output], output],
            )  # fmt: skip
            assert after.usage == whole.usage
            assert after.output_text == whole.output_text


async def test_a_custom_tool_of_chat_completions(calling: Service) -> None:
    custom = {"name": "apply_patch", "description": "Edits files."}
    asked: Any = {
        "model": "scripted",
        "messages": [{"role": "user", "content": CUSTOM_CALL}],
        "tools": [{"type": "custom", "custom": custom}],
    }
    async with openai_client(calling) as client:
        made = await client.chat.completions.create(**asked)
        assert made.choices[0].finish_reason == "tool_calls"
        (call,) = made.choices[0].message.tool_calls or []
        assert call.type == "custom"
        assert (call.custom.name, call.custom.input) == ("apply_patch", PATCHED)
        chunks = [one async for one in await client.chat.completions.create(**asked, stream=True)]
    (streamed,) = [call for one in chunks for call in one.choices[0].delta.tool_calls or ()]
    assert streamed.to_dict()["custom"] == {"name": "apply_patch", "input": PATCHED}


async def test_hosted_tools_are_refused_by_setting(tool_settings: Settings) -> None:
    refusing = tool_settings.model_copy(update={"hosted_tools": "refuse"})
    hello = [{"role": "user", "content": "hi"}]
    searched = [*hello, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]
    server = {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}
    async with serve(refusing) as service:
        for members, param in (
            ({"input": "hi", "tools": [RUN, {"type": "web_search"}]}, "tools[1].type"),
            ({"input": searched}, "input[1].type"),
        ):
            answer = await service.client.post(
                "/v1/responses", json={"model": "scripted"} | members
            )
            assert_openai_error(answer, 400, "invalid_request", param)
        tool = {"type": "web_search_20250305", "name": "web_search"}
        for messages in (
            {"messages": hello, "tools": [tool]},
            {"messages": [*hello, {"role": "assistant", "content": [server]}, *hello]},
        ):
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                body = {"model": "scripted", "max_tokens": 1} | messages
                answer = await service.client.post(path, json=body)
                error = assert_anthropic_error(answer, 400, "invalid_request")
                assert "is not supported: this service runs no tools" in error["message"]


async def test_a_count_names_the_tools_that_it_leaves_out(calling: Service) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    answer = await calling.client.post("/v1/messages/count_tokens", json=body)
    assert answer.headers["x-warning"].endswith(": web_search_20250305")
    streamed = await calling.client.post(
        "/v1/messages", json=body | {"stream": True, "max_tokens": 1}
    )
    assert streamed.headers["x-warning"].endswith(": web_search_20250305")
    assert "message_stop" in streamed.text


# --- Sessions -------------------------------------------------------------------------------------

AGENT_TEMPLATE = TOOL_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}",
)
TURNS = 20
TASK = "Fix the tests."
CUT = '{"command": "ls -la /srv"} '
IMAGE = png_uri(RED)
PDF = "JVBERi0xLjQK"
# Deeds of the model in a turn, and outputs of its tools.
DEEDS = ("call", "two calls", "cut arguments", "cut text", "nothing")
OUTPUTS: tuple[Any, ...] = (
    "total 0",
    "",
    None,
    "Error: exit status 1\x00\x7f",
    IMAGE,
    PDF,
    ["a", IMAGE],
)


@pytest.fixture
async def agents(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    """A service whose scripted model takes tools, and images in their results."""
    write_model(tmp_path, "scripted", template=AGENT_TEMPLATE, max_model_len=100_000)
    (tmp_path / "scripted" / "1" / "config.json").write_text(VISION)
    settings = make_settings(postgres_server, database_name, triton, model_repository=tmp_path)
    async with serve(settings, with_worker=True) as service:
        yield service


def script_of(deed: str, turn: int) -> str:
    first, second = call_of("run", command=f"ls {turn}"), call_of("run", command="pwd")
    return {
        "call": f"{{{{text=Turn {turn}. {first}}}}}",
        "two calls": f"{{{{text={first} {second}}}}}",
        "cut arguments": f"{{{{text={CUT}}}}}",
        "cut text": f"{{{{text=Turn {turn}. {first}}}}}",
        "nothing": "{{chunks=0}}",
    }[deed]


class ChatAgent:
    path, limit = "/v1/chat/completions", "max_completion_tokens"
    forced: ClassVar[Any] = {"type": "function", "function": {"name": "run"}}

    def __init__(self) -> None:
        self.history: list[Any] = [
            {"role": "system", "content": "You are an agent."}, {"role": "user", "content": TASK},
        ]  # fmt: skip

    def body(self, script: str) -> dict[str, Any]:
        function = {"name": "run", "parameters": SCHEMA}
        tools = [
            {"type": "function", "function": function},
            {"type": "custom", "custom": {"name": "apply_patch"}},
        ]
        return {"messages": [*self.history, {"role": "user", "content": script}], "tools": tools}

    def take(self, answer: Any) -> list[str]:
        message = answer["choices"][0]["message"]
        self.history.append(message)
        return [call["id"] for call in message.get("tool_calls") or ()]

    def give(self, call_id: str, output: Any) -> None:
        if output == PDF:
            file = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
            output = [{"type": "file", "file": file}]
        elif output == IMAGE or isinstance(output, list):
            output = list(map(chat_part, [output] if output == IMAGE else output))
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": output})

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})


class ResponsesAgent(ChatAgent):
    path, limit = "/v1/responses", "max_output_tokens"
    forced: ClassVar[Any] = {"type": "function", "name": "run"}

    def __init__(self) -> None:
        self.history = [{"type": "message", "role": "user", "content": TASK}]

    def body(self, script: str) -> dict[str, Any]:
        return {
            "instructions": "You are an agent.",
            "input": [*self.history, {"role": "user", "content": script}],
            "tools": [RUN, PATCH, CRM, {"type": "web_search", "external_web_access": False}],
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "session",
        }

    def take(self, answer: Any) -> list[str]:
        self.history += answer["output"]
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]

    def give(self, call_id: str, output: Any) -> None:
        if output == PDF:
            output = [{"type": "input_file", "filename": "a.pdf", "file_data": PDF}]
        elif output == IMAGE or isinstance(output, list):
            output = list(map(input_part, [output] if output == IMAGE else output))
        item = {"type": "function_call_output", "call_id": call_id, "output": output}
        self.history.append(item)


class MessagesAgent(ChatAgent):
    path, limit = "/v1/messages", "max_tokens"
    forced: ClassVar[Any] = {"type": "tool", "name": "run"}

    def __init__(self) -> None:
        self.history = [{"role": "user", "content": TASK}]

    def body(self, script: str) -> dict[str, Any]:
        return {
            "system": [{"type": "text", "text": "You are an agent.", "cache_control": None}],
            "messages": [*self.history, {"role": "user", "content": script}],
            "tools": [
                {"name": "run", "input_schema": SCHEMA},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            ],
            "max_tokens": 100,
        }

    def take(self, answer: Any) -> list[str]:
        self.history.append({"role": "assistant", "content": answer["content"]})
        return [one["id"] for one in answer["content"] if one["type"] == "tool_use"]

    def give(self, call_id: str, output: Any) -> None:
        if output == PDF:
            source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
            output = [{"type": "document", "source": source}]
        elif output == IMAGE or isinstance(output, list):
            output = list(map(block, [output] if output == IMAGE else output))
        result = {"type": "tool_result", "tool_use_id": call_id, "content": output}
        self.history.append(
            {"role": "user", "content": [result | {"is_error": "Error" in str(output)}]}
        )


async def take_turn(agents: Service, agent: ChatAgent, turn: int) -> httpx.Response:
    """One turn: the model's answer, and the outputs of its calls, become history."""
    deed = DEEDS[turn % len(DEEDS)]
    # The script is read from the first directive of a prompt: only the newest message has one.
    body = {"model": "scripted"} | agent.body(script_of(deed, turn))
    if turn == TURNS - 1:
        body["store"] = True  # its prompt is read
    if deed.startswith("cut"):
        body[agent.limit] = 4 if deed == "cut text" else 2
    if deed == "cut arguments":
        body["tool_choice"] = agent.forced
    answer = await agents.client.post(agent.path, json=body)
    assert answer.status_code == 200, (turn, deed, answer.text)
    calls = agent.take(answer.json())
    expected = {"call": 1, "two calls": 2, "cut arguments": 1}.get(deed, 0)
    assert len(calls) == expected, (turn, deed, answer.text)
    for place, call_id in enumerate(calls):
        agent.give(call_id, OUTPUTS[(turn + place) % len(OUTPUTS)])
    if not calls:
        agent.say("Go on.")
    return answer


@pytest.mark.parametrize("kind", [ChatAgent, ResponsesAgent, MessagesAgent])
async def test_a_session_of_twenty_turns_runs_to_its_end(
    agents: Service, kind: type[ChatAgent]
) -> None:
    agent = kind()
    answers = [await take_turn(agents, agent, turn) for turn in range(TURNS)]
    assert {"x-warning" in one.headers for one in answers} == {kind is not ChatAgent}
    result_id = UUID(answers[-1].headers["x-result-id"])
    prompt = (await agents.services.results.request("default", result_id)).prompt or ""
    assert "Error: exit status 1\ufffd" in prompt
    assert "which this service cannot show to the model" in prompt
    # Messages has no place for arguments that are no object: their text does not reach the client.
    assert ('<assistant> {"command": "ls <tool_call>' in prompt) == (kind is not MessagesAgent)
