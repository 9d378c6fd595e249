"""Images by Anthropic's messages and OpenAI's responses, through the official clients, unmodified.

Chat completions are the reference: the scripted model's words depend on the images and their places.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import anthropic
import asyncpg
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from app.core.settings import Settings
from tests.conftest import Service
from tests.images import BLUE, RED, block, input_part, is_image, png, png_uri
from tests.integration.inference.test_images import QUESTION, TEXTS, chat, vision_settings
from tests.integration.launching import Worker
from tests.integration.support import anthropic_client, openai_client, read, serve, until

__all__ = ["vision_settings"]

R, B = png_uri(RED), png_uri(BLUE)
CONTENTS = ((R, QUESTION), (QUESTION, R), ("one", R, "two {{chunks=3}}", B), (B, R, QUESTION))
SLOW = "slow {{chunks=60 delay_ms=50}}"


@pytest.fixture
async def served(vision_settings: Settings) -> AsyncIterator[Service]:
    async with serve(vision_settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def messages(served: Service) -> AsyncIterator[AsyncAnthropic]:
    async with anthropic_client(served) as one:
        yield one


@pytest.fixture
async def client(served: Service) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(served) as one:
        yield one


def by_messages(*parts: str) -> Any:
    turn = {"role": "user", "content": list(map(block, parts))}
    return {"model": "scripted", "max_tokens": 64, "messages": [turn]}


def by_responses(*parts: str) -> Any:
    item = {"role": "user", "content": list(map(input_part, parts))}
    return {"model": "scripted", "max_output_tokens": 64, "input": [item]}


async def by_chat(client: AsyncOpenAI, body: dict[str, Any]) -> str:
    answer = await client.chat.completions.create(**body | {"max_tokens": 64})
    return str(answer.choices[0].message.content)


async def stored(served: Service, identifier: str) -> list[dict[str, Any]]:
    """The stored messages of a message, response or result."""
    result = await read(served, identifier.rpartition("_")[2])
    context = await served.client.get(f"/contexts/{result['context_id']}")
    found: list[dict[str, Any]] = context.json()["messages"]
    return found


async def refused(request: Awaitable[object]) -> str:
    with pytest.raises((anthropic.BadRequestError, openai.BadRequestError)) as caught:
        await request
    return str(caught.value)


@pytest.mark.parametrize("parts", CONTENTS)
async def test_each_dialect_has_the_text_of_chat(
    served: Service, messages: AsyncAnthropic, client: AsyncOpenAI, parts: tuple[str, ...]
) -> None:
    expected = await by_chat(client, chat(*parts))
    message = await messages.messages.create(**by_messages(*parts))
    assert message.content[0].to_dict() == {
        "type": "text",
        "text": expected,
        "citations": None,
    }
    async with messages.messages.stream(**by_messages(*parts)) as stream:
        assert await stream.get_final_text() == expected
    response = await client.responses.create(**by_responses(*parts))
    assert response.output_text == expected
    events = await client.responses.create(**by_responses(*parts), stream=True)
    deltas = [one.delta async for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert await stored(served, message.id) == await stored(served, response.id)
    (turn,) = await stored(served, message.id)
    assert [one["url"] for one in turn["images"]] == list(filter(is_image, parts))


async def test_a_file_is_an_image(messages: AsyncAnthropic, client: AsyncOpenAI) -> None:
    """Anthropic's client encodes files itself."""
    body = by_messages(R, QUESTION)
    body["messages"][0]["content"][0]["source"]["data"] = io.BytesIO(png(RED))
    message = await messages.messages.create(**body)
    assert message.content[0].text == await by_chat(client, chat(R, QUESTION))


async def test_the_result_of_a_tool_has_images(
    served: Service, messages: AsyncAnthropic, client: AsyncOpenAI
) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [block("seen"), block(R), block(B)],
    }
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    body = by_messages("look") | {"max_tokens": 64}
    body["messages"] += [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, block(QUESTION)]},
    ]
    message = await messages.messages.create(**body)
    seen = {"type": "function_call_output", "call_id": "a"}
    seen["output"] = [input_part("seen"), input_part(R), input_part(B)]  # type: ignore[assignment]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        seen,
        {"role": "user", "content": QUESTION},
    ]
    response = await client.responses.create(**by_responses() | {"input": items})
    assert message.content[0].text == response.output_text
    assert await stored(served, message.id) == await stored(served, response.id)
    of_tool = (await stored(served, message.id))[2]
    images = [{"url": url, "after": 4} for url in (R, B)]
    assert (of_tool["role"], of_tool["content"], of_tool["images"]) == ("tool", "seen", images)
    found = await client.responses.input_items.list(response.id, order="asc")
    assert found.data[2].to_dict()["output"] == seen["output"]


async def test_a_count_has_one_place_for_each_image(messages: AsyncAnthropic) -> None:
    """The template's mark of an image is one word, as the scripted model's tokenizer counts."""
    counts = []
    for parts in (("a",), (R, " a"), (R, " a ", B)):
        body = by_messages(*parts) | {"max_tokens": 1}
        message = await messages.messages.create(**body)
        counted = await messages.messages.count_tokens(model="scripted", messages=body["messages"])
        assert counted.input_tokens == message.usage.input_tokens
        counts.append(counted.input_tokens)
    assert counts == [1, 2, 3]


async def test_a_batch_of_messages_has_images(
    messages: AsyncAnthropic, client: AsyncOpenAI
) -> None:
    bodies = {"red": by_messages(R, QUESTION), "blue": by_messages(QUESTION, B)}
    bodies["many"] = by_messages(R, R, R, "x")
    requests: Any = [{"custom_id": name, "params": body} for name, body in bodies.items()]
    batch = await messages.messages.batches.create(requests=requests)

    async def has_ended() -> bool:
        found = await messages.messages.batches.retrieve(batch.id)
        return found.processing_status == "ended"

    await until(has_ended, 60)
    results: dict[str, Any] = {
        one.custom_id: one.result async for one in await messages.messages.batches.results(batch.id)
    }
    for name, parts in (("red", (R, QUESTION)), ("blue", (QUESTION, B))):
        text = results[name].message.content[0].text
        assert text == await by_chat(client, chat(*parts))
    error = results["many"].error.error
    assert (error.type, "LLM_MAX_IMAGES" in error.message) == ("invalid_request_error", True)


async def test_a_message_has_the_bound_of_images(
    served: Service, messages: AsyncAnthropic, connection: asyncpg.Connection
) -> None:
    words = "have 3 images; a request may have 2 (LLM_MAX_IMAGES)"
    body = by_messages(R, R, R, "x")
    assert words in await refused(messages.messages.create(**body))
    turns = body["messages"]
    assert words in await refused(messages.messages.count_tokens(model="scripted", messages=turns))
    assert await connection.fetchval("SELECT count(*) FROM results") == 0


async def test_other_sources_are_refused_by_name(
    messages: AsyncAnthropic, client: AsyncOpenAI
) -> None:
    """URLs too, by default."""
    body, source = by_messages(R, "x"), {"type": "url", "url": "https://example.org/a.png"}
    words = "URLs are not fetched (LLM_IMAGE_URLS=off)"
    body["messages"][0]["content"][0]["source"] = source
    for request in (
        messages.messages.create(**body),
        messages.messages.count_tokens(model="scripted", messages=body["messages"]),
    ):
        assert words in await refused(request)
    asked = by_responses(R, "x")
    part = asked["input"][0]["content"][0]
    part["image_url"] = source["url"]
    assert words in await refused(client.responses.create(**asked))
    part |= {"image_url": None, "file_id": "file-1"}
    assert "file_id, which is not supported" in await refused(client.responses.create(**asked))


async def test_a_model_without_vision_refuses_images(
    vision_settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "scripted" / "1" / "chat_template.jinja").write_text(TEXTS)
    async with (
        serve(vision_settings, with_worker=True) as service,
        anthropic_client(service) as messages,
        openai_client(service) as client,
    ):
        body = by_messages(R, "x")
        for request in (
            messages.messages.create(**body),
            messages.messages.count_tokens(model="scripted", messages=body["messages"]),
            client.responses.create(**by_responses(R, "x")),
            client.responses.create(**by_responses(R, "x"), background=True),
        ):
            assert "model scripted takes no images" in await refused(request)


async def test_another_image_is_another_request(
    messages: AsyncAnthropic, client: AsyncOpenAI
) -> None:
    for create, body, error in (
        (messages.messages.create, by_messages, anthropic.ConflictError),
        (client.responses.create, by_responses, openai.ConflictError),
    ):
        headers = {"Idempotency-Key": body.__name__}
        first, again = [await create(**body(R, "x"), extra_headers=headers) for _ in range(2)]
        assert first.id == again.id
        with pytest.raises(error):
            await create(**body(B, "x"), extra_headers=headers)


async def test_a_template_without_places_in_results_of_tools_has_them_behind(
    vision_settings: Settings, tmp_path: Path, connection: asyncpg.Connection
) -> None:
    template = (
        "{% for message in messages %}<{{ message.role }}>"
        "{% if message.content is string or message.role == 'tool' %}{{ message.content }}"
        "{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    (tmp_path / "scripted" / "1" / "chat_template.jinja").write_text(template)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block(R), block("seen")]}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    body = by_messages("look")
    body["messages"] += [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, block("what"), block(B)]},
    ]
    async with (
        serve(vision_settings, with_worker=True) as service,
        anthropic_client(service) as messages,
    ):
        await messages.messages.create(**body)
    prompt = await connection.fetchval("SELECT prompt FROM results")
    assert prompt == "<user>look<assistant><tool>seen<user><image>what<image>"


@pytest.mark.parametrize("dialect", ["messages", "responses", "background"])
@pytest.mark.trial
async def test_a_killed_worker_loses_no_image(
    vision_settings: Settings, tmp_path: Path, dialect: str
) -> None:
    settings = vision_settings.model_copy(update={"lease_seconds": 5.0})
    async with (
        serve(settings, with_worker=False) as service,
        anthropic_client(service) as messages,
        openai_client(service) as client,
    ):
        workers = [Worker(settings, tmp_path) for _ in range(2)]
        await workers[0].start()
        headers = {"X-On-Disconnect": "continue"}
        sending: asyncio.Future[Any]
        if dialect == "messages":
            asked = by_messages(B, SLOW) | {"extra_headers": headers}
            sending = asyncio.ensure_future(messages.messages.create(**asked))
        else:
            asked = by_responses(B, SLOW) | {"extra_headers": headers}
            asked["background"] = dialect == "background"
            sending = asyncio.ensure_future(client.responses.create(**asked))
        try:

            async def has_text() -> Any:
                (one,) = (await service.client.get("/results/")).json() or [None]
                return one and (await read(service, one["id"], partial=True))["result"] and one

            found = await until(has_text)
            await workers[0].kill()
            await workers[1].start()
            result = await read(service, found["id"], wait=60)
            assert (result["state"], result["attempt"] >= 2) == ("completed", True), result["error"]
            expected = await by_chat(client, chat(B, SLOW))
            assert result["result"] == expected
            answer = await sending
            if dialect == "messages":
                assert answer.content[0].text == expected
            else:
                answer = await client.responses.retrieve(answer.id)
                assert answer.output_text == expected
        finally:
            await workers[1].kill()
