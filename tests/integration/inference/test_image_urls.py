"""Images by URL in each dialect, through the official clients: fetched once, and kept as data URIs."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from app.core.settings import Settings
from tests.conftest import Service
from tests.images import BLUE, RED, png, png_uri
from tests.integration.inference.test_dialect_images import (
    by_chat,
    by_messages,
    by_responses,
    refused,
    stored,
)
from tests.integration.inference.test_images import (
    QUESTION,
    TEXTS,
    chat,
    complete,
    finish,
    user,
    vision_settings,
)
from tests.integration.support import (
    anthropic_client,
    assert_openai_error,
    assert_problem,
    openai_client,
    read,
    serve,
    until,
)
from tests.integration.webhook_receiver import Receiver, answer, receiving

__all__ = ["vision_settings"]

R, B = png_uri(RED), png_uri(BLUE)


@pytest.fixture
async def store() -> AsyncIterator[Receiver]:
    """A server of images: a red one once, and a blue one from then on."""
    async with receiving() as server:
        server.turns = [answer(200, "Content-Type: image/png", body=png(RED))]
        server.respond = answer(200, "Content-Type: image/png", body=png(BLUE))
        yield server


@pytest.fixture
async def served(vision_settings: Settings) -> AsyncIterator[Service]:
    settings = vision_settings.model_copy(update={"image_urls": "any"})
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def messages(served: Service) -> AsyncIterator[AsyncAnthropic]:
    async with anthropic_client(served) as one:
        yield one


@pytest.fixture
async def client(served: Service) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(served) as one:
        yield one


def chat_by(url: str) -> dict[str, Any]:
    body = chat(R, QUESTION)
    body["messages"][0]["content"][0]["image_url"]["url"] = url
    return body


def message_by(url: str) -> Any:
    body = by_messages(R, QUESTION)
    body["messages"][0]["content"][0]["source"] = {"type": "url", "url": url}
    return body


def response_by(url: str) -> Any:
    body = by_responses(R, QUESTION)
    body["input"][0]["content"][0]["image_url"] = url
    return body


async def test_a_chat_keeps_the_image_of_its_url(
    served: Service, client: AsyncOpenAI, store: Receiver
) -> None:
    """Repetitions of its key and retries read what is kept."""
    expected, _ = await complete(served, R, QUESTION)
    body = chat_by(store.url) | {"max_tokens": 64}
    key = {"Idempotency-Key": "k"}
    raw = client.chat.completions.with_raw_response
    first, again = [await raw.create(**body, extra_headers=key) for _ in range(2)]
    assert first.parse().choices[0].message.content == expected
    identifier = first.headers["x-result-id"]
    assert again.headers["x-result-id"] == identifier
    (message,) = await stored(served, identifier)
    assert message["images"] == [{"url": R, "after": 0}]
    result = await read(served, identifier)
    assert result["parameters"]["images"]["characters"] == len(R)
    path = f"/results/{identifier}/retry"
    retried = await served.client.post(path, headers={"Prefer": "wait=30"})
    assert retried.json()["result"] == expected
    assert len(store.calls) == 1
    assert await by_chat(client, chat_by(store.url)) == await by_chat(client, chat(B, QUESTION))
    stream = await client.chat.completions.create(**body, stream=True)
    words = "".join([one.choices[0].delta.content or "" async for one in stream if one.choices])
    assert words == await by_chat(client, chat(B, QUESTION))
    assert len(store.calls) == 3


async def test_messages_and_responses_keep_the_images_of_their_urls(
    served: Service, messages: AsyncAnthropic, client: AsyncOpenAI, store: Receiver
) -> None:
    expected, _ = await complete(served, R, QUESTION)
    message = await messages.messages.create(**message_by(store.url))
    assert message.content[0].text == expected
    assert (await stored(served, message.id))[0]["images"][0]["url"] == R
    store.turns = [answer(200, "Content-Type: image/png", body=png(RED))]
    response = await client.responses.create(**response_by(store.url))
    assert response.output_text == expected
    items = await client.responses.input_items.list(response.id)
    assert items.to_dict()["data"][0]["content"][0]["image_url"] == R  # type: ignore[index]
    following = await client.responses.create(
        model="scripted", input="and now", previous_response_id=response.id
    )
    assert (await stored(served, following.id))[0]["images"][0]["url"] == R
    assert len(store.calls) == 2
    counted = await messages.messages.count_tokens(
        model="scripted", messages=message_by(store.url)["messages"]
    )
    inline = await messages.messages.count_tokens(
        model="scripted", messages=by_messages(B, QUESTION)["messages"]
    )
    assert counted == inline


async def test_the_native_api_keeps_the_image_of_a_url(served: Service, store: Receiver) -> None:
    first = await finish(served, user(store.url))
    assert first["result"] == (await finish(served, user(R)))["result"]
    saved = await served.client.post("/contexts/", json={"messages": user(store.url, R)})
    assert saved.status_code == 201, saved.text
    assert [one["url"] for one in saved.json()["messages"][0]["images"]] == [B, R]
    context = await served.client.get(f"/contexts/{saved.json()['id']}")
    assert context.json() == saved.json()
    assert len(store.calls) == 2


Ask = Callable[[str], Awaitable[object]]


def dialects(messages: AsyncAnthropic, client: AsyncOpenAI) -> list[Ask]:
    return [
        lambda url: client.chat.completions.create(**chat_by(url)),
        lambda url: client.responses.create(**response_by(url)),
        lambda url: client.responses.create(**response_by(url), background=True),
        lambda url: messages.messages.create(**message_by(url)),
        lambda url: messages.messages.count_tokens(
            model="scripted", messages=message_by(url)["messages"]
        ),
    ]


async def assert_native_refusals(served: Service, url: str, words: str) -> None:
    for path, body in (
        ("/results/", {"model": "scripted", "messages": user(url)}),
        ("/contexts/", {"messages": user(url)}),
    ):
        answered = await served.client.post(path, json=body)
        problem = assert_problem(answered, 422, "invalid_request", "messages")
        assert words in problem["detail"], problem


async def test_a_wrong_image_is_refused_in_the_shape_of_the_dialect(
    served: Service, messages: AsyncAnthropic, client: AsyncOpenAI, store: Receiver,
    connection: asyncpg.Connection,
) -> None:  # fmt: skip
    store.turns, store.respond = [], answer(404)
    words = "the image of 127.0.0.1: answered 404"
    for ask in dialects(messages, client):
        assert words in await refused(ask(store.url))
    await assert_native_refusals(served, store.url, words)
    param = assert_openai_error(
        await served.client.post("/v1/responses", json=response_by(store.url)), 400, param="input"
    )
    assert words in param["message"]
    for table in ("results", "contexts"):
        assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0


async def test_private_addresses_and_all_urls_are_refused_by_settings(
    vision_settings: Settings, store: Receiver
) -> None:
    for mode, words in (
        ("off", "URLs are not fetched (LLM_IMAGE_URLS=off)"),
        ("public", "127.0.0.1 is not a public address; LLM_IMAGE_URLS=any permits it"),
    ):
        settings = vision_settings.model_copy(update={"image_urls": mode})
        async with (
            serve(settings, with_worker=True) as service,
            anthropic_client(service) as messages,
            openai_client(service) as client,
        ):
            for ask in dialects(messages, client):
                assert words in await refused(ask(store.url))
            await assert_native_refusals(service, store.url, words)
    assert store.calls == []


async def test_a_model_without_vision_has_nothing_fetched(
    vision_settings: Settings, store: Receiver
) -> None:
    template = vision_settings.model_repository / "scripted" / "1" / "chat_template.jinja"
    template.write_text(TEXTS)
    settings = vision_settings.model_copy(update={"image_urls": "any"})
    async with (
        serve(settings, with_worker=True) as service,
        anthropic_client(service) as messages,
        openai_client(service) as client,
    ):
        for ask in dialects(messages, client):
            assert "model scripted takes no images" in await refused(ask(store.url))
    assert store.calls == []


async def test_lists_and_batches_refuse_urls(
    served: Service, messages: AsyncAnthropic, client: AsyncOpenAI, store: Receiver
) -> None:
    items = [{"model": "scripted", "messages": user(one)} for one in (store.url, R)]
    wrong, accepted = (await served.client.post("/results/", json=items)).json()
    assert "URLs of images are not fetched in a list: send data URIs" in wrong["detail"]
    assert accepted["state"] == "pending"
    requests: Any = [{"custom_id": "a", "params": message_by(store.url)}]
    batch = await messages.messages.batches.create(requests=requests)

    async def has_ended() -> bool:
        found = await messages.messages.batches.retrieve(batch.id)
        return found.processing_status == "ended"

    await until(has_ended, 60)
    (line,) = [one async for one in await messages.messages.batches.results(batch.id)]
    error = line.result.error.error  # type: ignore[union-attr]
    assert (error.type, "not fetched in a batch" in error.message) == (
        "invalid_request_error",
        True,
    )
    assert store.calls == []
