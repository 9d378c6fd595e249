"""Reasoning models through the official client and the native API, against a real socket."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from openai import AsyncOpenAI

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, make_settings
from tests.integration.support import anthropic_client, openai_client, serve, write_model
from tests.postgres import PostgresServer

# As that of Qwen 3: it takes tools and earlier reasoning, and can close the reasoning at once.
TEMPLATE = (
    "{% if tools %}<tool_call> {% endif %}"
    "{% for message in messages %}<{{ message.role }}> "
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}] {% endif %}"
    "{{ message.content }} {% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %} <think> </think>"
    "{% elif opened %} <think>{% endif %}"
)
TEXT = "<think> two words </think> the answer"
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call> {"name": "add", "arguments": {} } </tool_call> '


def say(text: str) -> Any:
    """Messages that the scripted model answers with this text."""
    return [{"role": "user", "content": "{{text=" + text + "}}"}]


@pytest.fixture
def thinking_settings(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> Settings:
    write_model(tmp_path, "scripted", template=TEMPLATE, max_model_len=100_000)
    return make_settings(postgres_server, database_name, triton, model_repository=tmp_path)


@pytest.fixture
async def served(thinking_settings: Settings) -> AsyncIterator[Service]:
    async with serve(thinking_settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def client(served: Service) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(served) as one:
        yield one


async def chat(client: AsyncOpenAI, text: str, **members: Any) -> Any:
    return await client.chat.completions.create(model="scripted", messages=say(text), **members)


def joined(chunks: list[Any], name: str) -> str:
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return "".join(getattr(delta, name, None) or "" for delta in deltas)


async def test_a_chat_has_reasoning_and_content(served: Service, client: AsyncOpenAI) -> None:
    answer = await chat(client, TEXT)
    message = answer.choices[0].message
    assert message.reasoning_content == message.reasoning == " two words "
    assert message.content == " the answer"
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == 2
    stored = await served.client.get(f"/results/{answer.id.partition('-')[2]}")
    assert stored.json()["result"] == TEXT  # as the model wrote it
    stream = await chat(client, TEXT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert joined(chunks, "reasoning_content") == joined(chunks, "reasoning") == " two words "
    assert joined(chunks, "content") == " the answer"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 2


async def test_the_request_decides_about_reasoning(client: AsyncOpenAI) -> None:
    hidden = await chat(client, TEXT, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert hidden.choices[0].message.content == " the answer"
    # The prompt ends inside of reasoning, or behind it.
    for variables, members in (
        ({"opened": True}, ("so ", " yes")),
        ({"opened": True, "enable_thinking": False}, (None, "so </think> yes")),
    ):
        answer = await chat(
            client, "so </think> yes", extra_body={"chat_template_kwargs": variables}
        )
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == members
    answer = await chat(client, "so </think> yes", reasoning_effort="none")
    assert answer.choices[0].message.content == "so </think> yes"


async def test_calls_are_behind_the_reasoning(client: AsyncOpenAI) -> None:
    answer = await chat(client, f"<think> so </think> {CALL}", tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.reasoning, choice.message.content) == (" so ", None)
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    unclosed = await chat(client, f"<think> so {CALL}", tools=TOOLS)
    assert unclosed.choices[0].message.reasoning == " so "
    assert len(unclosed.choices[0].message.tool_calls) == 1
    forced = await chat(
        client, '[{"name": "add", "parameters": {} }] ', tools=TOOLS, tool_choice="required"
    )
    assert len(forced.choices[0].message.tool_calls) == 1


async def test_earlier_reasoning_goes_to_the_template(served: Service, client: AsyncOpenAI) -> None:
    for name in ("reasoning_content", "reasoning"):
        messages: Any = [{"role": "assistant", "content": "yes", name: "why"}, *say("x")]
        answer = await client.chat.completions.create(model="scripted", messages=messages)
        result = UUID(answer.id.partition("-")[2])
        request = await served.services.results.request("default", result)
        assert (request.prompt or "").startswith("<assistant> [why] yes <user>")


async def test_a_response_has_a_reasoning_item(served: Service, client: AsyncOpenAI) -> None:
    text = say(TEXT)[0]["content"]
    made = await client.responses.create(model="scripted", input=text)
    reasoning, message = made.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == [" two words "]
    assert made.output_text == " the answer"
    assert made.usage is not None
    assert made.usage.output_tokens_details.reasoning_tokens == 2
    assert made.reasoning is not None
    assert "rules" not in made.reasoning.to_dict()
    assert await client.responses.retrieve(made.id) == made
    async with client.responses.stream(model="scripted", input=text) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert message.type == "message"
    assert final.output_text == made.output_text
    following = await client.responses.create(
        model="scripted", input="and?", previous_response_id=made.id
    )
    request = await served.services.results.request(
        "default", UUID(following.id.removeprefix("resp_"))
    )
    assert "<assistant> [ two words ]  the answer <user>" in (request.prompt or "")


async def test_an_operator_turns_it_off(thinking_settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "scripted" / "chat.json").write_text('{"reasoning_format": "off"}')
    async with serve(thinking_settings, with_worker=True) as service, openai_client(service) as one:
        answer = await chat(one, TEXT)
        assert answer.choices[0].message.content == TEXT
        assert not hasattr(answer.choices[0].message, "reasoning")


# --- Anthropic's messages ---------------------------------------------------------------------------


async def test_a_message_has_thinking_and_text(served: Service) -> None:
    body: Any = {"model": "scripted", "max_tokens": 50, "messages": say(TEXT)}
    async with anthropic_client(served) as client:
        made = await client.messages.create(**body)
        thinking, text = made.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert (thinking.thinking, text.text) == (" two words ", " the answer")
        assert thinking.signature
        assert made.usage.output_tokens_details
        assert made.usage.output_tokens_details.thinking_tokens == 2
        async with client.messages.stream(**body) as stream:
            kinds = [
                event.delta.type async for event in stream if event.type == "content_block_delta"
            ]
            final = await stream.get_final_message()
        assert kinds == sorted(kinds, key=["thinking_delta", "signature_delta", "text_delta"].index)
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].to_dict() | {"signature": ""} == thinking.to_dict() | {
            "signature": ""
        }
        hiding: Any = ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"})
        for thinking_config in hiding:
            hidden = await client.messages.create(**body, thinking=thinking_config)
            assert [block.type for block in hidden.content] == ["text"]
            async with client.messages.stream(**body, thinking=thinking_config) as stream:
                final = await stream.get_final_message()
            assert [block.type for block in final.content] == ["text"]


async def test_earlier_thinking_goes_to_the_template(
    served: Service, connection: asyncpg.Connection
) -> None:
    async with anthropic_client(served) as client:
        first = await client.messages.create(model="scripted", max_tokens=50, messages=say(TEXT))
        made = await client.messages.create(
            model="scripted",
            max_tokens=5,
            messages=[
                {"role": "user", "content": "one"},
                first.to_param(),
                {"role": "user", "content": "two"},
            ],
        )
    prompt = await connection.fetchval(
        "SELECT prompt FROM results WHERE id = $1", UUID(made.id.removeprefix("msg_"))
    )
    assert prompt == "<user> one <assistant> [ two words ]  the answer <user> two <assistant>"
