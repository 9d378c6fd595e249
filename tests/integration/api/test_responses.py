"""OpenAI's responses through the official client, unmodified, against a real socket."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import openai
import pytest
from openai import APIStatusError, AsyncOpenAI

from app.api.openai.response_events import ATTEMPT_STEP, PRELUDE
from app.core.settings import Settings
from tests.conftest import ROOT, Service
from tests.integration.support import openai_client, serve, until

SLOW = "{{chunks=400 delay_ms=20}}"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}


@pytest.fixture
async def client(calling: Service) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(calling) as one:
        yield one


async def ask(client: AsyncOpenAI, prompt: Any, /, **members: Any) -> Any:
    return await client.responses.create(model="scripted", input=prompt, **members)


async def end_of(client: AsyncOpenAI, response_id: str) -> Any:
    async def ended() -> Any:
        found = await client.responses.retrieve(response_id)
        return found if found.status not in ("queued", "in_progress") else None

    return await until(ended, 30)


async def native(calling: Service, response_id: str) -> dict[str, Any]:
    answer = await calling.client.get(f"/results/{response_id.removeprefix('resp_')}")
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def rendered(connection: asyncpg.Connection, response_id: str) -> str:
    prompt: str = await connection.fetchval(
        "SELECT prompt FROM results WHERE id = $1", UUID(response_id.removeprefix("resp_"))
    )
    return prompt


def texts(events: list[Any]) -> str:
    return "".join(one.delta for one in events if one.type == "response.output_text.delta")


def check_numbers(events: list[Any]) -> None:
    """They rise, and a delta's is the end of its text."""
    numbers = [one.sequence_number for one in events]
    assert numbers == sorted(set(numbers))
    known = 0
    for one in events:
        if one.type == "response.output_text.delta" and known is not None:
            known += len(one.delta)
            assert one.sequence_number % ATTEMPT_STEP == PRELUDE + known


async def test_a_response(calling: Service, client: AsyncOpenAI) -> None:
    made = await ask(
        client, "{{chunks=5}} hello", instructions="be brief", metadata={"a": "b"}, temperature=0.5
    )
    result = await native(calling, made.id)
    assert (made.object, made.status, made.model) == ("response", "completed", "scripted")
    assert made.output_text == result["result"] != ""
    assert made.usage.input_tokens == result["usage"]["prompt_tokens"]
    assert made.usage.output_tokens == 5
    assert made.usage.total_tokens == made.usage.input_tokens + 5
    assert made.usage.input_tokens_details.to_dict() == {
        "cached_tokens": 0,
        "cache_write_tokens": 0,
    }
    assert made.usage.output_tokens_details.to_dict() == {"reasoning_tokens": 0}
    assert (made.instructions, made.metadata, made.temperature) == ("be brief", {"a": "b"}, 0.5)
    assert (made.error, made.incomplete_details, made.previous_response_id) == (None, None, None)
    assert (made.tools, made.tool_choice, made.parallel_tool_calls) == ([], "auto", True)
    assert (made.output[0].role, made.output[0].status) == ("assistant", "completed")
    assert result["metadata"] == {"a": "b"}
    assert await client.responses.retrieve(made.id) == made
    items: Any = await client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items.data] == ["{{chunks=5}} hello"]
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(made.id)


async def test_a_response_has_the_models_sampling(tool_settings: Settings) -> None:
    """Whole, read again, and in the events: what the request leaves open is the model's own."""
    version = tool_settings.model_repository / "scripted" / "1"
    (version / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    expected = {"temperature": 0.6, "top_p": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.0}
    async with serve(tool_settings, with_worker=True) as service, openai_client(service) as client:
        made = await ask(client, "{{chunks=2}}", extra_body={"presence_penalty": 0.5})
        stream = await client.responses.retrieve(made.id, stream=True)
        events: list[Any] = [one async for one in stream]
        again = await client.responses.retrieve(made.id)
    for response in (made, again, events[0].response, events[-1].response):
        assert expected.items() <= response.to_dict().items()
        assert response.top_logprobs == 0


async def test_what_the_length_cut_is_incomplete(client: AsyncOpenAI) -> None:
    made = await ask(client, "{{chunks=50}}", max_output_tokens=3)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"
    assert made.usage.output_tokens == 3
    stream = await ask(client, "{{chunks=50}}", max_output_tokens=3, stream=True)
    events = [one async for one in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == made.output_text


@pytest.mark.trial
async def test_a_stream(client: AsyncOpenAI) -> None:
    # Chunks that wait for a stalled machine arrive as one delta: some come before it, or after.
    script = "{{chunks=60 delay_ms=10}} ü🙂"
    events = [one async for one in await ask(client, script, stream=True)]
    kinds = [one.type for one in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    check_numbers(events)
    final = events[-1].response
    assert texts(events) == final.output_text == events[-4].text
    assert final == await client.responses.retrieve(final.id)
    assert events[0].response.id == final.id


async def test_the_clients_own_accumulator_agrees(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="scripted", input="{{chunks=9 delay_ms=5}}") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == (await client.responses.retrieve(final.id)).output_text


async def test_a_background_response_is_polled(calling: Service, client: AsyncOpenAI) -> None:
    made = await ask(client, "{{chunks=20 delay_ms=20}}", background=True)
    assert made.status == "queued"
    assert made.background
    assert made.output == []
    ended = await end_of(client, made.id)
    assert ended.status == "completed"
    assert ended.output_text == (await native(calling, made.id))["result"]


@pytest.mark.trial
async def test_a_background_stream_is_taken_up_again_anywhere(
    tool_settings: Settings, calling: Service, client: AsyncOpenAI
) -> None:
    stream = await ask(client, "{{chunks=150 delay_ms=20}} ü🙂", background=True, stream=True)
    events = []
    async for one in stream:
        events.append(one)
        if len(events) == 12:
            break
    await stream.close()  # it leaves, and the response goes on
    assert [one.type for one in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    response_id = events[0].response.id
    async with serve(tool_settings) as far, openai_client(far) as other:
        last = events[-1].sequence_number
        resumed = await other.responses.retrieve(response_id, stream=True, starting_after=last)
        rest = [one async for one in resumed]
    check_numbers([*events, *rest])
    final = rest[-1].response  # type: ignore[union-attr]
    assert final.status == "completed"
    assert texts([*events, *rest]) == final.output_text
    # From any place, and from none, when it is over.
    whole = [one async for one in await client.responses.retrieve(response_id, stream=True)]
    assert texts(whole) == final.output_text
    assert whole[-1].sequence_number == rest[-1].sequence_number
    for place in (0, 2, 4, PRELUDE + 7, whole[-2].sequence_number):
        resumed = await client.responses.retrieve(response_id, stream=True, starting_after=place)
        tail = [one async for one in resumed]
        assert all(one.sequence_number > place for one in tail)
        assert texts(tail) == final.output_text[max(0, place - PRELUDE) :]
        assert tail[-1] == whole[-1]
    resumed = await client.responses.retrieve(
        response_id, stream=True, starting_after=whole[-1].sequence_number
    )
    assert [one async for one in resumed] == []


async def test_a_new_attempt_ends_the_stream(client: AsyncOpenAI) -> None:
    """Deltas of the lost attempt are not spliced with the next one's text."""
    stream = await ask(client, "{{chunks=30 delay_ms=30 lost_at=10}}", background=True, stream=True)
    events = [one async for one in stream]
    assert events[-1].type == "error"
    assert events[-1].code == "attempt_restarted"
    assert texts(events)
    response_id = events[0].response.id
    ended = await end_of(client, response_id)
    assert ended.status == "failed"
    known = next(one for one in events if one.type == "response.output_text.delta")
    resumed = await client.responses.retrieve(
        response_id, stream=True, starting_after=known.sequence_number
    )
    assert [one.code for one in [event async for event in resumed]] == [  # type: ignore[union-attr]
        "attempt_restarted"
    ]
    anew = [one async for one in await client.responses.retrieve(response_id, stream=True)]
    check_numbers(anew)
    assert anew[-1].type == "response.failed"
    assert anew[-1].sequence_number > ATTEMPT_STEP
    assert anew[-1].response.error
    assert anew[-1].response.error.code == "server_error"
    assert texts(anew) == anew[-1].response.output_text


@pytest.mark.trial
async def test_a_synchronous_stream_that_breaks_off_leaves_nothing_running(
    calling: Service, client: AsyncOpenAI
) -> None:
    # Each attempt is lost after two seconds: the cancellation comes before the last one.
    stream = await ask(client, "{{chunks=300 delay_ms=400 lost_at=5}}", stream=True)
    events = [one async for one in stream]
    assert events[-1].code == "attempt_restarted"
    result_id = events[0].response.id.removeprefix("resp_")
    result = (await calling.client.get(f"/results/{result_id}?wait=30")).json()
    assert result["error"]["code"] == "cancelled"


async def test_cancel_is_idempotent_and_of_the_background_alone(
    calling: Service, client: AsyncOpenAI
) -> None:
    stream = await ask(client, SLOW, background=True, stream=True)
    async for one in stream:
        if one.type == "response.output_text.delta":
            break
    response_id = f"resp_{(await calling.client.get('/results/')).json()[0]['id']}"
    first = await client.responses.cancel(response_id)
    assert first.status == "cancelled"
    assert await client.responses.cancel(response_id) == first
    rest = [one async for one in stream]
    assert rest[-1].type == "response.failed"
    assert rest[-1].response.status == "cancelled"
    done = await ask(client, "{{chunks=1}}", background=True)
    ended = await end_of(client, done.id)
    assert await client.responses.cancel(done.id) == ended
    assert ended.status == "completed"
    made = await ask(client, "{{chunks=1}}")
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(made.id)


@pytest.mark.trial
async def test_a_client_that_leaves_takes_its_response_with_it(
    calling: Service, client: AsyncOpenAI
) -> None:
    for members, headers, state in (
        ({}, {}, "failed"),
        ({"stream": True}, {}, "failed"),
        ({}, {"X-On-Disconnect": "continue"}, "completed"),
        ({"background": True, "stream": True}, {}, "completed"),
        ({"background": True, "stream": True}, {"X-On-Disconnect": "cancel"}, "completed"),
    ):
        chunks = 400 if state == "failed" else 60
        script = f"{{{{chunks={chunks} delay_ms=25}}}}"
        body = {"model": "scripted", "input": script} | members

        async def leave(body: Any = body, headers: Any = headers) -> None:
            async with calling.client.stream(
                "POST", "/v1/responses", json=body, headers=headers
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


async def test_a_conversation_goes_on(client: AsyncOpenAI, connection: asyncpg.Connection) -> None:
    first = await ask(client, "{{chunks=3}} one", instructions="old rules")
    second = await ask(client, "two", previous_response_id=first.id, instructions="new rules")
    assert second.previous_response_id == first.id
    assert await rendered(connection, second.id) == (
        f"<system> new rules <user> {{{{chunks=3}}}} one <assistant> {first.output_text} "
        "<user> two <assistant>"
    )
    third = await ask(
        client, [{"role": "user", "content": "three"}], previous_response_id=second.id
    )
    assert await rendered(connection, third.id) == (
        f"<user> {{{{chunks=3}}}} one <assistant> {first.output_text} <user> two <assistant> "
        f"{second.output_text} <user> three <assistant>"
    )
    # The items of its own request alone.
    items = await client.responses.input_items.list(third.id)
    assert len(items.data) == 1


async def test_what_no_conversation_can_go_on_from(
    client: AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    running = await ask(client, SLOW, background=True)
    gone = await ask(client, "{{chunks=1}}", store=False)
    foreign = await ask(client, "{{chunks=1}}")
    await connection.execute(
        "UPDATE results SET team_id = 'other' WHERE id = $1", UUID(foreign.id.removeprefix("resp_"))
    )
    unknown = "resp_01890000-0000-7000-8000-000000000000"
    for previous in (running.id, gone.id, foreign.id, unknown, "x"):
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, "more", previous_response_id=previous)
        assert refused.value.param == "previous_response_id"
    for call in (
        client.responses.retrieve(foreign.id),
        client.responses.cancel(foreign.id),
        client.responses.delete(foreign.id),
        client.responses.input_items.list(foreign.id),
        client.responses.retrieve(gone.id),
        client.responses.retrieve("resp_x"),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    await client.responses.delete(running.id)  # which stops it
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(running.id)


async def test_a_result_of_another_dialect_is_no_response(
    calling: Service, client: AsyncOpenAI
) -> None:
    answer = await calling.client.post("/results/", json={"model": "scripted", "content": "x"})
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(f"resp_{answer.json()['id']}")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_to_be_stored_is_erased_at_its_delivery(
    calling: Service, client: AsyncOpenAI, connection: asyncpg.Connection, stream: bool
) -> None:
    if stream:
        events = [
            one async for one in await ask(client, "secret {{chunks=4}}", store=False, stream=True)
        ]
        made = events[-1].response
    else:
        made = await ask(client, "secret {{chunks=4}}", store=False)
    assert made.output_text
    assert made.store is False
    identifier = UUID(made.id.removeprefix("resp_"))

    async def is_erased() -> bool:
        query = "SELECT erased_at IS NOT NULL FROM results WHERE id = $1"
        return bool(await connection.fetchval(query, identifier))

    await until(is_erased)
    recorded = await connection.fetchval(
        "SELECT to_jsonb(r)::text || to_jsonb(c)::text FROM results r"
        " JOIN contexts c ON c.id = r.context_id WHERE r.id = $1",
        identifier,
    )
    assert "secret" not in recorded
    assert made.output_text not in recorded
    result = await native(calling, made.id)
    assert (result["state"], result["result"]) == ("completed", None)
    assert result["erased_at"]
    assert result["usage"]["completion_tokens"] == 4
    again = await calling.client.post(f"/results/{identifier}/retry")
    assert (again.status_code, again.json()["code"]) == (410, "erased")


async def test_what_is_not_to_be_stored_is_no_response_before_its_erasure_either(
    client: AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    stream = await ask(client, SLOW, store=False, stream=True)
    running = (await anext(aiter(stream))).response.id
    ended = (await ask(client, "secret {{chunks=1}}")).id
    # As a process leaves it that dies between the delivery and the erasure.
    await connection.execute(
        """UPDATE results SET store = false, request = jsonb_set(request, '{is_stored}', 'false')
           WHERE id = $1""",
        UUID(ended.removeprefix("resp_")),
    )
    for one in (running, ended):
        for call in (
            client.responses.retrieve(one),
            client.responses.retrieve(one, stream=True),
            client.responses.cancel(one),
            client.responses.delete(one),
            client.responses.input_items.list(one),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="there is no response") as refused:
            await ask(client, "more", previous_response_id=one)
        assert refused.value.param == "previous_response_id"
    rows = await connection.fetch("SELECT state, erased_at FROM results ORDER BY id")
    assert [tuple(row) for row in rows] == [("pending", None), ("completed", None)]
    await stream.close()


async def test_what_nobody_fetched_is_erased_after_an_hour(
    calling: Service, client: AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    made = await ask(client, "secret {{chunks=4}}")
    kept = await ask(client, "{{chunks=4}}")
    await connection.execute(
        "UPDATE results SET store = false WHERE id = $1", UUID(made.id.removeprefix("resp_"))
    )
    await calling.services.erasure.erase_undelivered()
    assert (await native(calling, made.id))["result"]
    await connection.execute("UPDATE results SET finished_at = now() - interval '1 h'")
    await calling.services.erasure.erase_undelivered()
    assert (await native(calling, made.id))["result"] is None
    assert (await native(calling, kept.id))["result"]


async def test_chat_and_completions_are_erased_too(
    calling: Service, client: AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    chat = await client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "secret"}], store=False, n=2
    )
    assert all(choice.message.content for choice in chat.choices)
    answer = await calling.client.post(
        "/v1/completions", json={"model": "scripted", "prompt": "secret", "store": False}
    )
    assert answer.json()["choices"][0]["text"]

    async def are_erased() -> bool:
        kept = "SELECT count(*) FROM results WHERE erased_at IS NULL OR output IS NOT NULL"
        return not await connection.fetchval(kept)

    await until(are_erased)
    assert await connection.fetchval("SELECT count(*) FROM results") == 3
    stored = await connection.fetch("SELECT content, messages FROM contexts")
    assert {tuple(row) for row in stored} == {("", None)}


async def test_an_erased_answer_is_not_told_again(calling: Service) -> None:
    body = {"model": "scripted", "input": "{{chunks=2}}", "store": False}
    headers = {"Idempotency-Key": "once"}
    first = await calling.client.post("/v1/responses", json=body, headers=headers)
    assert first.status_code == 200

    async def again() -> bool:
        answer = await calling.client.post("/v1/responses", json=body, headers=headers)
        return answer.status_code == 410 and answer.json()["error"]["code"] == "erased"

    await until(again)


@pytest.mark.parametrize("background", [False, True])
async def test_a_key_names_one_response(calling: Service, background: bool) -> None:
    body = {"model": "scripted", "input": "{{chunks=2}}", "background": background}
    headers = {"Idempotency-Key": "key"}
    first, second = [
        await calling.client.post("/v1/responses", json=body, headers=headers) for _ in range(2)
    ]
    assert first.json()["id"] == second.json()["id"]
    streamed = await calling.client.post(
        "/v1/responses", json=body | {"stream": True}, headers=headers
    )
    assert first.json()["id"] in streamed.text


CALL = '<tool_call> {"name": "weather", "arguments": {"town": "Bonn"} } </tool_call>'


async def test_tools(client: AsyncOpenAI, connection: asyncpg.Connection) -> None:
    asked = f"{{{{delay_ms=5 text=let me see {CALL}}}}}"
    made = await ask(client, asked, tools=[WEATHER])
    message, call = made.output
    assert message.content[0].text.strip() == "let me see"
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"town": "Bonn"}
    stream = await ask(client, asked, tools=[WEATHER], stream=True, background=True)
    events = [one async for one in stream]
    numbers = [one.sequence_number for one in events]
    assert numbers == sorted(set(numbers))
    assert texts(events) == message.content[0].text
    kinds = [one.type for one in events]
    assert kinds[-5:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1].response
    assert [one.type for one in final.output] == ["message", "function_call"]
    for place in numbers[:-1]:
        resumed = await client.responses.retrieve(final.id, stream=True, starting_after=place)
        tail = [one async for one in resumed]
        assert [
            one.sequence_number for one in tail if one.type != "response.output_text.delta"
        ] == [
            one.sequence_number
            for one in events
            if one.sequence_number > place and one.type != "response.output_text.delta"
        ]
        assert texts(tail) == texts([one for one in events if one.sequence_number > place])
    # The tool's output goes back to the model, after the call.
    after = await ask(
        client,
        [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        previous_response_id=made.id,
        tools=[WEATHER],
    )
    prompt = await rendered(connection, after.id)
    assert '<tool_call> {"name": "weather", "arguments": {"town": "Bonn"}} </tool_call>' in prompt
    assert prompt.endswith("<tool> rain <assistant>")
    # The same conversation, carried by its client.
    whole = await ask(
        client,
        [
            {"role": "user", "content": asked},
            *[one.model_dump() for one in made.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ],
        tools=[WEATHER],
    )
    assert await rendered(connection, whole.id) == prompt


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        (r'{"town": "a\u0000b\ud800c"}', '{"town": "a\ufffdb\ufffdc"}'),
        ('{"town": 1e400}', '{"town": "inf"}'),
        (f'{{"town": "a", "n": {10**30}}}', f'{{"town": "a", "n": "{10**30}"}}'),
        ('{"town": %s}' % ("[" * 300 + "]" * 300), "{}"),
    ],
)
async def test_a_conversation_goes_on_from_any_call(
    client: AsyncOpenAI, connection: asyncpg.Connection, arguments: str, taken: str
) -> None:
    tools: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    made = await ask(client, f"{{{{text={arguments} }}}}", **tools)
    (call,) = made.output
    assert (call.status, call.arguments) == ("completed", arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = await ask(client, [output], previous_response_id=made.id, tools=[WEATHER])
    prompt = await rendered(connection, after.id)
    assert f'"arguments": {taken}' in prompt


async def test_a_forced_call_that_does_not_follow_its_schema_fails(client: AsyncOpenAI) -> None:
    tools: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    for arguments in ('{"town": "Bo', f'{{"town": {10**30}}}'):
        with pytest.raises(APIStatusError) as refusal:
            await ask(client, f"{{{{text={arguments} }}}}", **tools)
        assert (refusal.value.status_code, refusal.value.code) == (502, "invalid_output")


async def test_a_call_that_the_length_cut_is_incomplete(
    client: AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    tools: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    asked = '{{text={"town": "a town by the river"} }}'
    made = await ask(client, asked, max_output_tokens=2, **tools)
    assert made.status == "incomplete"
    (call,) = made.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = await ask(client, [output], previous_response_id=made.id, tools=[WEATHER])
    assert after.status == "completed"
    assert '"arguments": {}' in await rendered(connection, after.id)


async def test_a_format_and_probabilities(calling: Service, client: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = await ask(
        client,
        '{{text={"a": 1} }}',
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}},
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    parameters = (await native(calling, made.id))["parameters"]
    assert parameters["structured_outputs"]["json"] == schema
    recorded = made.output[0].content[0].logprobs
    assert "".join(one.token for one in recorded) == made.output_text
    assert all(one.logprob < 0 for one in recorded)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "store"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 200_000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "nonsense"}}}, "response_format"),
        ({"text": {"format": {"type": "text", "more": 10**30}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "weather", "more": 10**30}}, "tool_choice"),
        ({"max_tool_calls": 10**30}, "max_tool_calls"),
        ({"max_tool_calls": -1}, "max_tool_calls"),
        ({"n": 2}, "n"),
    ],
)
async def test_members_that_are_not_supported_are_refused_by_name(
    calling: Service, members: dict[str, Any], param: str
) -> None:
    body = {"model": "scripted", "input": "x"} | members
    answer = await calling.client.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert (await calling.client.get("/results/")).json() == []


@pytest.mark.trial
async def test_a_background_response_waits_for_its_model(
    calling: Service, client: AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nobody", input="x", background=True)
    await calling.client.post("/models/scripted/unload")
    try:

        async def is_away() -> bool:
            return not (await calling.client.get("/models/scripted")).json()["ready"]

        await until(is_away)
        with pytest.raises(openai.InternalServerError):
            await ask(client, "{{chunks=1}}")
        made = await ask(client, "{{chunks=1}}", background=True)
        assert (await client.responses.retrieve(made.id)).status == "queued"
    finally:
        await calling.client.post("/models/scripted/load")
    assert (await end_of(client, made.id)).status == "completed"


@pytest.mark.parametrize("document", ["responses.md", "batches.md"])
@pytest.mark.trial
async def test_the_documents_programs_run(calling: Service, document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program = program.replace("http://127.0.0.1:8887", str(calling.client.base_url).rstrip("/"))
    output = await output_of(program)
    assert len(output.split()) > 10
    if document == "batches.md":  # a second run takes the batch up again, by its printed id
        batch_id, _, answers = output.partition("\n")
        assert await output_of(program, batch_id) == answers


async def output_of(program: str, *arguments: str) -> str:
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program.replace('"demo"', '"scripted"'), *arguments),
        stdout=subprocess.PIPE,
    )
    output, _ = await run.communicate()
    assert run.returncode == 0
    return output.decode()


async def test_a_starting_point_that_never_was_is_refused(client: AsyncOpenAI) -> None:
    made = await ask(client, "{{chunks=1}}", background=True)
    for place in (ATTEMPT_STEP, -1):
        with pytest.raises(openai.BadRequestError):
            await client.responses.retrieve(made.id, stream=True, starting_after=place)
    await end_of(client, made.id)
