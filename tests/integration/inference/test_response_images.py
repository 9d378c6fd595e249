"""Images in conversations of OpenAI's responses, through the official client, unmodified."""

import json
from typing import Any

import asyncpg
import openai
import pytest
from openai import AsyncOpenAI

from app.core.settings import Settings
from tests.conftest import Service
from tests.images import BLUE, RED, data_uri, input_part, png, png_uri
from tests.integration.inference.test_dialect_images import (
    by_chat,
    by_responses,
    client,
    refused,
    served,
    stored,
)
from tests.integration.inference.test_images import QUESTION, chat, vision_settings
from tests.integration.support import openai_client, serve, until

__all__ = ["client", "served", "vision_settings"]

R, B = png_uri(RED), png_uri(BLUE)


async def test_a_conversation_keeps_its_images(served: Service, client: AsyncOpenAI) -> None:
    first = await client.responses.create(**by_responses("one", R, QUESTION))
    second = await client.responses.create(
        **by_responses("and {{chunks=4}}"), previous_response_id=first.id
    )
    third = await client.responses.create(
        **by_responses(B, "and {{chunks=5}}"), previous_response_id=second.id, background=True
    )

    async def is_over() -> Any:
        found = await client.responses.retrieve(third.id)
        return found if found.status == "completed" else None

    third = await until(is_over)
    turns = chat("one", R, QUESTION)["messages"]
    for earlier, parts, later in (
        (first, ["and {{chunks=4}}"], second),
        (second, [B, "and {{chunks=5}}"], third),
    ):
        turns += [{"role": "assistant", "content": earlier.output_text}, *chat(*parts)["messages"]]
        assert later.output_text == await by_chat(client, {"model": "scripted", "messages": turns})
    images = [turn.get("images") for turn in await stored(served, third.id)]
    assert images == [[{"url": R, "after": 3}], None, None, None, [{"url": B, "after": 0}]]
    for response, own in (
        (first, ["one", R, QUESTION]),
        (second, ["and {{chunks=4}}"]),
        (third, [B, "and {{chunks=5}}"]),
    ):
        (item,) = (await client.responses.input_items.list(response.id)).data
        assert item.to_dict()["content"] == list(map(input_part, own))


async def test_images_of_a_response_are_stored_once(
    served: Service, client: AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    await client.responses.create(**by_responses(R, QUESTION))
    text = await connection.fetchval("SELECT request::text FROM results")
    assert "input_image" in text
    assert "base64" not in text
    await client.responses.create(**by_responses(B, QUESTION), store=False)
    erased = "SELECT count(*) FROM contexts WHERE messages IS NULL AND erased_at IS NOT NULL"
    await until(lambda: connection.fetchval(erased))
    assert await connection.fetchval(erased) == 1
    assert await connection.fetchval("SELECT count(*) FROM results WHERE request IS NULL") == 1


async def test_a_conversation_has_the_bounds_of_a_request(
    served: Service, client: AsyncOpenAI
) -> None:
    first = await client.responses.create(**by_responses(R, B, QUESTION))
    third = by_responses(R, "three") | {"previous_response_id": first.id}
    words = "have 3 images; a request may have 2 (LLM_MAX_IMAGES)"
    assert words in await refused(client.responses.create(**third))
    assert words in await refused(client.responses.create(**by_responses(R, R, R, "x")))


async def test_the_images_of_a_conversation_have_the_bound_of_a_body(
    vision_settings: Settings,
) -> None:
    settings = vision_settings.model_copy(update={"max_body_bytes": 20_000})
    large = data_uri(png(RED) + bytes(9_000))
    assert len(large) > 10_000
    async with serve(settings, with_worker=True) as service, openai_client(service) as client:
        first = await client.responses.create(**by_responses(large, QUESTION))
        small = await client.responses.create(
            **by_responses(R, QUESTION), previous_response_id=first.id
        )
        assert small.status == "completed"
        again = by_responses(large, QUESTION) | {"previous_response_id": first.id}
        assert "LLM_MAX_BODY_BYTES" in await refused(client.responses.create(**again))
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(**by_responses(large, large))
        assert caught.value.status_code == 413


async def test_a_batch_of_responses_has_images(client: AsyncOpenAI) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses"}
    content = json.dumps(line | {"body": by_responses(QUESTION, R)}).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )

    async def is_over() -> str | None:
        return (await client.batches.retrieve(batch.id)).output_file_id

    output = await client.files.content(await until(is_over, 60))
    response = json.loads(output.content)["response"]["body"]
    text = response["output"][0]["content"][0]["text"]
    assert text == await by_chat(client, chat(QUESTION, R))
