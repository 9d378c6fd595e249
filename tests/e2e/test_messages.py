"""Anthropic's official client, unmodified, against the service on real vLLM."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.support import anthropic_client, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ASKED: Any = {
    "model": "demo",
    "system": "Helpers.",
    "messages": [{"role": "user", "content": "Write a function that adds."}],
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}
TURNS = 20
TOOLS: Any = [
    {
        "name": name,
        "input_schema": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    }
    for name in ("light", "heat")
]


@contextlib.asynccontextmanager
async def speak_to(settings: Settings) -> AsyncIterator[tuple[Service, AsyncAnthropic]]:
    """A service behind a real socket, and the official client of it."""
    async with serve(settings, with_worker=True) as service, anthropic_client(service) as client:
        yield service, client


async def test_a_message_and_its_stream_have_the_native_text(vllm_settings: Settings) -> None:
    async with speak_to(vllm_settings) as (service, client):
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            streamed = await stream.get_final_message()
        stored = await service.client.get(f"/results/{whole.id.removeprefix('msg_')}")
        text = stored.json()["result"]
        assert whole.content[0].to_dict() == {"type": "text", "text": text}
        assert streamed.content[0].text == text  # type: ignore[union-attr]
        assert streamed.usage == whole.usage
        counted = await client.messages.count_tokens(
            model="demo", system=ASKED["system"], messages=ASKED["messages"]
        )
        assert counted.input_tokens == whole.usage.input_tokens


async def test_a_stop_sequence_ends_the_text(vllm_settings: Settings) -> None:
    async with speak_to(vllm_settings) as (_, client):
        whole = await client.messages.create(**ASKED)
        text = whole.content[0].text
        stop = text[len(text) // 2 :][:3]
        assert stop
        ended = await client.messages.create(**ASKED, stop_sequences=["never so", stop])
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
        before = text[: text.index(stop)]
        got = "".join(block.text for block in ended.content if block.type == "text")
        assert got.strip() == before.strip()
        async with client.messages.stream(**ASKED, stop_sequences=[stop]) as stream:
            streamed = await stream.get_final_message()
        assert streamed.stop_sequence == stop
        assert "".join(b.text for b in streamed.content if b.type == "text") == got


async def test_an_agent_of_twenty_turns(tools_settings: Settings) -> None:
    """Each turn calls a tool and gets its result, with the whole conversation so far."""
    messages: list[Any] = [{"role": "user", "content": "Light!"}]
    async with speak_to(tools_settings) as (_, client):
        for turn in range(TURNS):
            async with client.messages.stream(
                model="tools",
                max_tokens=800,
                messages=messages,
                tools=TOOLS,
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                extra_body={"seed": turn},
            ) as stream:
                answer = await stream.get_final_message()
            (call,) = answer.content
            assert answer.stop_reason == "tool_use", (turn, answer)
            assert call.type == "tool_use"
            assert call.name in ("light", "heat")
            assert isinstance(call.input["on"], bool)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
            messages += [answer.to_param(), {"role": "user", "content": [result]}]
        final = await client.messages.create(
            model="tools",
            max_tokens=4,
            messages=messages,
            tools=TOOLS,
            tool_choice={"type": "none"},
        )
        assert all(block.type == "text" for block in final.content)
        assert final.usage.input_tokens > TURNS
