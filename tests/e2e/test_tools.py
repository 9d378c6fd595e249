"""Tools and structured outputs by official clients, unmodified, on real vLLM.

The model's template begins with the token that its tokenizer adds.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.support import anthropic_client, openai_client, serve

pytestmark = pytest.mark.timeout(300)

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["color", "count", "flags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
NAMES = ("light", "heat")
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
ANTHROPIC_TOOLS: Any = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
TURNS = 20
TOOLS_ASKED: Any = {
    "model": "tools",
    "messages": [{"role": "user", "content": "A thing."}],
    "max_tokens": 400,
    "temperature": 1,
}


@pytest.fixture
async def service(tools_settings: Settings) -> AsyncIterator[Service]:
    """The service behind a real port."""
    async with serve(tools_settings, with_worker=True) as running:
        yield running


async def test_no_token_is_added_twice(service: Service) -> None:
    messages: Any = [{"role": "user", "content": "é"}]
    rendered = "<|begin|>user: é\nassistant: "
    async with openai_client(service) as client:
        model = await service.services.registry.find("tools")
        assert model.format is not None
        assert await model.format.render(messages) == rendered
        answer = await client.chat.completions.create(
            model="tools", messages=messages, max_tokens=4
        )
        assert answer.usage is not None
        # One token a byte, and the one at the beginning.
        bare = rendered.removeprefix("<|begin|>")
        assert answer.usage.prompt_tokens == len(bare.encode()) + 1
        assert answer.usage.prompt_tokens == await model.format.count_tokens(
            model.format.for_engine(rendered)
        )


async def test_forced_tools_are_called(service: Service) -> None:
    asked: Any = {
        "model": "tools",
        "messages": [{"role": "user", "content": "Light!"}],
        "tools": TOOLS,
        "max_tokens": 400,
    }
    async with openai_client(service) as client:
        answer = await client.chat.completions.create(
            **asked, tool_choice="required", parallel_tool_calls=False, seed=1
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name in ("light", "heat")
        assert isinstance(json.loads(call.function.arguments)["on"], bool)
        named: Any = {"type": "function", "function": {"name": "heat"}}
        stream = await client.chat.completions.create(**asked, tool_choice=named, stream=True)
        calls = [
            call
            async for chunk in stream
            for choice in chunk.choices
            for call in choice.delta.tool_calls or []
        ]
        (only,) = calls
        assert only.function is not None
        assert only.function.name == "heat"
        assert isinstance(json.loads(only.function.arguments or "")["on"], bool)
        # And back again, as agents do.
        messages = [
            *asked["messages"],
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        final = await client.chat.completions.create(
            **asked | {"messages": messages, "max_tokens": 4}, tool_choice="none"
        )
        assert final.choices[0].message.tool_calls is None


class Thing(BaseModel):
    """The schema for the client's own parsing helper."""

    color: Literal["red", "green"]
    is_big: bool


async def test_structured_outputs(service: Service) -> None:
    async with openai_client(service) as client:
        for seed in range(3):
            answer = await client.chat.completions.create(
                **TOOLS_ASKED | {"seed": seed},
                response_format=FORMAT,
            )
            assert answer.choices[0].finish_reason == "stop"
            jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
        parsed = await client.chat.completions.parse(
            **TOOLS_ASKED | {"seed": 3}, response_format=Thing
        )
        assert isinstance(parsed.choices[0].message.parsed, Thing)
        async with client.chat.completions.stream(
            **TOOLS_ASKED | {"seed": 3}, response_format=Thing
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
        for extra, expected in (
            ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
            ({"structured_outputs": {"regex": "[ab]{3}"}}, None),
        ):
            completion = await client.completions.create(
                model="tools", prompt="x = ", extra_body=extra, max_tokens=8
            )
            text = completion.choices[0].text
            assert text in expected if expected else set(text) <= {"a", "b"} and len(text) == 3


async def test_an_agent_of_twenty_turns(service: Service) -> None:
    """Each turn calls a tool and gets its result, with the whole conversation so far."""
    messages: list[Any] = [{"role": "user", "content": "Light!"}]
    async with anthropic_client(service) as client:
        for turn in range(TURNS):
            async with client.messages.stream(
                model="tools",
                max_tokens=800,
                messages=messages,
                tools=ANTHROPIC_TOOLS,
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
            tools=ANTHROPIC_TOOLS,
            tool_choice={"type": "none"},
        )
        assert all(block.type == "text" for block in final.content)
        assert final.usage.input_tokens > TURNS
