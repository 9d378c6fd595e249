"""Anthropic's messages through the official client, unmodified, against a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import anthropic
import asyncpg
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.conftest import Service
from tests.integration.support import (
    anthropic_client,
    assert_anthropic_error,
    until,
)

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = '<tool_call> {"name": "weather", "arguments": {"town": "Ulm"} } </tool_call>'

# Each member that Anthropic's schema requires.
ENDED: dict[str, Any] = {
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "stop_details": None,
    "container": None,
}
USED: dict[str, Any] = {
    "output_tokens_details": None,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "server_tool_use": None,
    "inference_geo": None,
    "service_tier": "standard",
}
ZERO = {"input_tokens": 0, "output_tokens": 0}


@pytest.fixture
async def client(calling: Service) -> AsyncIterator[AsyncAnthropic]:
    async with anthropic_client(calling) as one:
        yield one


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def body_of(prompt: Any, /, **members: Any) -> Any:
    messages = prompt if isinstance(prompt, list) else [user(prompt)]
    return {"model": "scripted", "max_tokens": 50, "messages": messages} | members


async def ask(client: AsyncAnthropic, prompt: Any, /, **members: Any) -> Any:
    return await client.messages.create(**body_of(prompt, **members))


def plain(message: Any) -> dict[str, Any]:
    """A message without the members that the client's accumulator adds."""
    found: dict[str, Any] = message.to_dict()
    for block in found["content"]:
        block.pop("parsed_output", None)
    return found


async def take_all(stream: Any, events: list[Any]) -> None:
    async for event in stream:
        events.append(event)  # noqa: PERF401 # kept when the stream breaks


async def native(calling: Service, message_id: str) -> dict[str, Any]:
    answer = await calling.client.get(f"/results/{message_id.removeprefix('msg_')}")
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def rendered(connection: asyncpg.Connection, message_id: str) -> str:
    prompt: str = await connection.fetchval(
        "SELECT prompt FROM results WHERE id = $1", UUID(message_id.removeprefix("msg_"))
    )
    return prompt


async def test_a_message(
    calling: Service, client: AsyncAnthropic, connection: asyncpg.Connection
) -> None:
    made = await ask(
        client,
        "{{chunks=5}} hello",
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.5, "top_k": 7},
        metadata={"user_id": "someone"},
    )
    result = await native(calling, made.id)
    assert (made.type, made.role, made.model) == ("message", "assistant", "scripted")
    whole = plain(made)
    assert whole["content"] == [{"type": "text", "text": result["result"], "citations": None}]
    assert {name: whole[name] for name in ENDED} == ENDED
    counts = {"input_tokens": result["usage"]["prompt_tokens"], "output_tokens": 5}
    assert whole["usage"] == USED | counts
    assert result["metadata"] == {"user_id": "someone"}
    assert (result["parameters"]["top_k"], result["parameters"]["temperature"]) == (7, 0.5)
    assert made._request_id
    assert await rendered(connection, made.id) == (
        "<system> be brief <user> {{chunks=5}} hello <assistant>"
    )


async def test_turns_become_the_templates_messages(
    client: AsyncAnthropic, connection: asyncpg.Connection
) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Ulm"}}
    made = await ask(
        client,
        [
            user("{{chunks=1}} one"),
            user([{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "let me see"},
                    use,
                ],
            },
            user(
                [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                    {"type": "tool_result", "tool_use_id": "toolu_2"},
                    {"type": "text", "text": "and now?"},
                ]
            ),
        ],
        tools=[WEATHER],
        tool_choice={"type": "none"},
        thinking={"type": "disabled"},
    )
    assert await rendered(connection, made.id) == (
        "[thinking False] <user> {{chunks=1}} one\ntwo\nthree <assistant> let me see "
        '<tool_call> {"name": "weather", "arguments": {"town": "Ulm"}} </tool_call> '
        "<tool> rain <tool>  <user> and now? <assistant>"
    )


async def test_the_last_assistant_message_is_continued(
    client: AsyncAnthropic, connection: asyncpg.Connection
) -> None:
    prefill = {"role": "assistant", "content": "The answer is ("}
    made = await ask(client, [user("{{chunks=1}} which?"), prefill])
    assert await rendered(connection, made.id) == (
        "<user> {{chunks=1}} which? <assistant> The answer is ("
    )


async def test_reasons_of_the_end(calling: Service, client: AsyncAnthropic) -> None:
    words = "{{text=one two three four}}"
    made = await ask(client, words, max_tokens=2)
    assert (made.content[0].text, made.stop_reason) == ("one two", "max_tokens")
    made = await ask(client, words, stop_sequences=["five", "three"])
    assert made.content[0].text == "one two "
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "three")
    assert (await native(calling, made.id))["result"] == "one two three"
    made = await ask(client, words, stop_sequences=["one"])
    assert (made.content, made.stop_sequence) == ([], "one")
    made = await ask(client, words, max_tokens=100_000, timeout=60)
    assert made.stop_reason == "end_turn"
    assert (await native(calling, made.id))["parameters"]["max_tokens"] < 100_000


async def test_a_stream_has_the_events_of_the_message(
    calling: Service, client: AsyncAnthropic
) -> None:
    script = "{{chunks=60 delay_ms=10}} ü🙂"
    stream = await ask(client, script, max_tokens=100, stream=True)
    kinds, text, message_id = [], "", ""
    async for event in stream:
        kinds.append(event.type)
        if event.type == "content_block_delta":
            text += event.delta.text
        if event.type == "message_start":
            message_id = event.message.id
            assert event.message.content == []
            begun = ENDED | {"stop_reason": None, "usage": USED | ZERO}
            assert begun.items() <= event.message.to_dict().items()
        if event.type == "content_block_start":
            assert event.content_block.to_dict() == {"type": "text", "text": "", "citations": None}
        if event.type == "message_delta":
            assert event.delta.to_dict() == ENDED
            assert event.usage.to_dict().keys() == USED.keys() | ZERO.keys()
            assert event.usage.output_tokens == 60
            assert event.usage.input_tokens > 0
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert text == (await native(calling, message_id))["result"]


@pytest.mark.parametrize("text", ["one STOP two", "one ST OP", "STOP", "", "a S"])
async def test_a_stream_ends_as_the_message_does(client: AsyncAnthropic, text: str) -> None:
    """The client's own accumulator makes the same message of the events."""
    prompt = f"{{{{delay_ms=5 text={text}}}}}" if text else "{{chunks=0}}"
    members = {"stop_sequences": ["STOP", "OPS"]}
    whole = await ask(client, prompt, **members)
    async with client.messages.stream(**body_of(prompt, **members)) as stream:
        final = await stream.get_final_message()
    same = {"content", "stop_reason", "stop_sequence", "usage", "model"}
    assert final.usage.output_tokens == whole.usage.output_tokens
    for name in same - {"usage"}:
        assert plain(final)[name] == plain(whole)[name], name


async def test_a_tool_is_called(client: AsyncAnthropic) -> None:
    prompt = f"{{{{text=Let me see. {CALL} {CALL}}}}}"
    for members in ({}, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}):
        made = await ask(client, prompt, tools=[WEATHER], **members)
        kinds = [block.type for block in made.content]
        assert kinds == ["text", "tool_use"] + ([] if members else ["tool_use"])
        call = made.content[1]
        assert (call.name, call.input) == ("weather", {"town": "Ulm"})
        assert call.id.startswith("toolu_")
        assert call.to_dict()["caller"] == {"type": "direct"}
        assert made.stop_reason == "tool_use"
        async with client.messages.stream(**body_of(prompt, tools=[WEATHER], **members)) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == kinds
        assert plain(final)["content"][1] == call.to_dict() | {"id": final.content[1].id}  # type: ignore[union-attr]
        assert final.content[0].text == made.content[0].text  # type: ignore[union-attr]
        assert final.stop_reason == "tool_use"


async def test_a_tool_is_forced(calling: Service, client: AsyncAnthropic) -> None:
    made = await ask(
        client,
        '{{text={"town":"Ulm"} }}',
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather"},
    )
    assert [block.type for block in made.content] == ["tool_use"]
    assert (made.content[0].input, made.stop_reason) == ({"town": "Ulm"}, "tool_use")
    forced = (await native(calling, made.id))["parameters"]["structured_outputs"]
    assert forced == {"json": WEATHER["input_schema"]}
    listed = '[{"name":"weather","parameters":{"town":"Ulm"} }]'
    made = await ask(client, f"{{{{text={listed}}}}}", tools=[WEATHER], tool_choice={"type": "any"})
    assert [block.type for block in made.content] == ["tool_use"]
    cut = await ask(
        client, '{{text={"town": "Ulm"} }}', max_tokens=1, tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather"},
    )  # fmt: skip
    assert (cut.content[0].input, cut.stop_reason) == ({}, "max_tokens")


async def test_a_format_is_forced(calling: Service, client: AsyncAnthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    made = await ask(client, '{{text={"a":1} }}', output_config=wanted)
    assert json.loads(made.content[0].text) == {"a": 1}
    parameters = (await native(calling, made.id))["parameters"]
    assert parameters["structured_outputs"] == {"json": schema}


@pytest.mark.trial
async def test_an_agent_of_twenty_turns(client: AsyncAnthropic) -> None:
    """Each turn has the whole conversation so far, as coding agents send it."""
    messages: list[Any] = []
    for turn in range(20):
        call = CALL.replace("Ulm", f"Ulm{turn}")
        script = f"{{{{text=Turn {turn}. {call}}}}}"
        said = [{"type": "text", "text": script}]
        if messages:
            use = messages[-1]["content"][-1]
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": f"rain {turn}"}
            # The script is read from the first directive of a prompt: only the newest turn has one.
            said.insert(0, result)
        messages.append(user(said))
        async with client.messages.stream(
            **body_of(messages, tools=[WEATHER], system="You are an agent."),
            extra_headers={"anthropic-beta": "tools-2099-01-01"},
        ) as stream:
            answer = await stream.get_final_message()
        assert answer.stop_reason == "tool_use", turn
        assert answer.content[-1].input == {"town": f"Ulm{turn}"}  # type: ignore[union-attr]
        messages[-1]["content"][-1]["text"] = f"turn {turn}"
        messages.append({"role": "assistant", "content": [b.to_dict() for b in answer.content]})
    ids = [message["content"][-1]["id"] for message in messages[1::2]]
    assert len(set(ids)) == 20


async def test_tokens_are_counted_as_the_engine_counts_them(client: AsyncAnthropic) -> None:
    conversation = {"model": "scripted", "messages": [user("one two three")], "tools": [WEATHER]}
    counted = await client.messages.count_tokens(**conversation)  # type: ignore[arg-type]
    without = await client.messages.count_tokens(model="scripted", messages=[user("one two three")])
    assert without.input_tokens == 5  # with the two marks of the template
    assert counted.input_tokens > without.input_tokens


async def test_a_repeated_key_returns_the_first_message(
    calling: Service, client: AsyncAnthropic
) -> None:
    headers = {"Idempotency-Key": "k"}
    first = await ask(client, "{{chunks=4}}", extra_headers=headers)
    again = await ask(client, "{{chunks=4}}", extra_headers=headers)
    assert again == first
    async with client.messages.stream(**body_of("{{chunks=4}}"), extra_headers=headers) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.id, plain(streamed)["content"]) == (first.id, plain(first)["content"])
    with pytest.raises(anthropic.ConflictError):
        await ask(client, "{{chunks=5}}", extra_headers=headers)


@pytest.mark.trial
async def test_a_stream_that_is_cut_is_read_again(calling: Service, client: AsyncAnthropic) -> None:
    """Under its key, by a new stream; and by the native one from any place."""
    headers = {"Idempotency-Key": "cut"}
    body = body_of("{{chunks=40 delay_ms=20}} ü")
    async with client.messages.stream(**body, extra_headers=headers) as stream:
        async for event in stream:
            if event.type == "content_block_delta":
                break
        message_id = stream.current_message_snapshot.id
    async with client.messages.stream(**body, extra_headers=headers) as stream:
        final = await stream.get_final_message()
    assert final.id == message_id
    result = await native(calling, message_id)
    assert (result["state"], result["result"]) == ("completed", final.content[0].text)  # type: ignore[union-attr]


@pytest.mark.trial
async def test_a_client_that_leaves_takes_its_message_with_it(calling: Service) -> None:
    for members, headers, state in (
        ({}, {}, "failed"),
        ({"stream": True}, {}, "failed"),
        ({"stream": True}, {"X-On-Disconnect": "continue"}, "completed"),
    ):
        body = body_of("{{delay_ms=25}}", max_tokens=400 if state == "failed" else 50) | members

        async def leave(body: Any = body, headers: Any = headers) -> None:
            async with calling.client.stream(
                "POST", "/v1/messages", json=body, headers=headers
            ) as answer:
                async for _ in answer.aiter_bytes():
                    pass

        before = len((await calling.client.get("/results/")).json())
        leaving = asyncio.create_task(leave())

        async def is_running(before: int = before) -> Any:
            results = (await calling.client.get("/results/")).json()
            return len(results) > before and results[0]["started_at"] and results[0]["id"]

        result_id = await until(is_running)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        result = (await calling.client.get(f"/results/{result_id}?wait=30")).json()
        assert result["state"] == state, (members, headers, result)


async def test_failures_are_errors_of_the_client(calling: Service, client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.InternalServerError) as failed:
        await ask(client, "{{chunks=9 fail_at=3}}")
    assert (failed.value.status_code, failed.value.type) == (502, "api_error")
    assert failed.value.error_code == "model_error"
    assert failed.value.request_id
    with pytest.raises(anthropic.BadRequestError) as refused:
        await ask(client, "{{refuse}}")
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(**body_of("x", model="claude"))
    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "unknown_model")
    stream = await ask(client, "{{chunks=30 delay_ms=20 fail_at=10}}", stream=True)
    events: list[Any] = []
    with pytest.raises(anthropic.APIStatusError) as broken:
        await take_all(stream, events)
    assert events[-1].type == "content_block_delta"
    assert (broken.value.type, broken.value.error_code) == ("api_error", "model_error")


async def test_a_new_attempt_ends_the_stream(client: AsyncAnthropic) -> None:
    stream = await ask(client, "{{chunks=30 delay_ms=30 lost_at=10}}", stream=True)
    events: list[Any] = []
    with pytest.raises(anthropic.APIStatusError) as lost:
        await take_all(stream, events)
    assert events[-1].type == "content_block_delta"
    assert (lost.value.type, lost.value.error_code) == ("overloaded_error", "attempt_lost")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"container": "c"}, "container: is not supported"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"messages": [user([{"type": "image", "source": {"type": "file"}}])]}, "'file' is not supported"),
        ({"messages": [user([{"type": "document", "source": {}}])]}, "'document' is not supported"),
        ({"messages": [user([{"type": "tool_use", "id": "a", "name": "b", "input": {}}])]}, "tool_use"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "tool_result"),
        ({"tools": [{"type": "a b", "name": "web_search"}]}, "'a b' is not supported"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "no tool 'x'"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [WEATHER], "output_config": {"format": {"type": "json_schema", "schema": {}}}},
         "tool_choice none"),
        ({"system": [{"type": "image"}]}, "'image'"),
        ({"messages": [user("x" * 100_001 + " y" * 100_001)]}, "takes 100000"),
    ],
)  # fmt: skip
async def test_wrong_members_are_named(calling: Service, members: Any, words: str) -> None:
    body = {name: value for name, value in (body_of("x") | members).items() if value is not None}
    answer = await calling.client.post("/v1/messages", json=body)
    error = assert_anthropic_error(answer, 400, "invalid_request")
    assert words in error["message"], error
    assert (await calling.client.get("/results/")).json() == []


async def test_the_blocking_client_works_too(calling: Service) -> None:
    def blocking() -> str:
        with Anthropic(base_url=str(calling.client.base_url), api_key="none") as client:
            whole = client.messages.create(**body_of("{{text=one two}}"))
            with client.messages.stream(**body_of("{{text=one two}}")) as stream:
                text = "".join(stream.text_stream)
            assert whole.content[0].text == text
            return text

    assert await asyncio.to_thread(blocking) == "one two"
