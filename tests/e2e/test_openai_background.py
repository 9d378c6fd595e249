"""Responses and batches on real vLLM, through the official client, unmodified."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.support import openai_client, serve, until

pytestmark = pytest.mark.timeout(300)

ASKED: Any = {"model": "demo", "max_output_tokens": 60, "extra_body": {"ignore_eos": True}}
QUESTION = "How do I join two paths?"


@pytest.fixture
async def served(vllm_settings: Settings) -> AsyncIterator[Service]:
    async with serve(vllm_settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def client(served: Service) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(served) as one:
        yield one


def texts(events: list[Any]) -> str:
    return "".join(one.delta for one in events if one.type == "response.output_text.delta")


async def test_a_background_response_is_followed_left_and_taken_up_again(
    vllm_settings: Settings, client: AsyncOpenAI
) -> None:
    stream = await client.responses.create(input=QUESTION, background=True, stream=True, **ASKED)
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if len(texts(events)) > 20:
            break
    await stream.close()
    response_id = events[0].response.id
    async with serve(vllm_settings) as far, openai_client(far) as other:
        resumed = await other.responses.retrieve(
            response_id, stream=True, starting_after=events[-1].sequence_number
        )
        rest: list[Any] = [event async for event in resumed]
    final = rest[-1].response
    assert final.status == "incomplete"  # at its length
    assert final.usage.output_tokens == 60
    assert texts(events) + texts(rest) == final.output_text
    assert await client.responses.retrieve(response_id) == final
    # Greedy, and so the same again; and the conversation goes on.
    again = await client.responses.create(input=QUESTION, temperature=0, **ASKED)
    twin = await client.responses.create(input=QUESTION, temperature=0, background=True, **ASKED)

    async def ended() -> Any:
        found = await client.responses.retrieve(twin.id)
        return found if found.status not in ("queued", "in_progress") else None

    assert (await until(ended, 30)).output_text == again.output_text
    follow_up = await client.responses.create(
        input="And split one?", previous_response_id=again.id, **ASKED
    )
    assert follow_up.usage
    assert again.usage
    assert follow_up.usage.input_tokens > again.usage.input_tokens + 60


async def test_a_background_response_is_cancelled(served: Service, client: AsyncOpenAI) -> None:
    long = ASKED | {"max_output_tokens": 900}
    stream = await client.responses.create(input=QUESTION, background=True, stream=True, **long)
    events: list[Any] = []
    cancelled: Any = None
    async for event in stream:
        events.append(event)
        if cancelled is None and texts(events):
            cancelled = await client.responses.cancel(events[0].response.id)
    assert cancelled.status == "cancelled"
    assert events[-1].response.status == "cancelled"
    assert events[-1].response.output_text == texts(events)
    assert await client.responses.cancel(cancelled.id) == cancelled


async def test_a_batch_of_chats(client: AsyncOpenAI) -> None:
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "demo",
                "messages": [{"role": "user", "content": f"Question {number}"}],
                "max_tokens": 8,
                "temperature": 9 if number == 5 else 0,
            },
        }
        for number in range(40)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    async def ended() -> Any:
        found = await client.batches.retrieve(batch.id)
        return found if found.status == "completed" else None

    done = await until(ended, 90)
    assert (done.request_counts.completed, done.request_counts.failed) == (39, 1)
    output = [
        json.loads(line)
        for line in (await client.files.content(done.output_file_id)).text.splitlines()
    ]
    assert len(output) == 39
    for one in output:
        body = one["response"]["body"]
        assert body["choices"][0]["message"]["content"]
        assert 0 < body["usage"]["completion_tokens"] <= 8
    (refused,) = (await client.files.content(done.error_file_id)).text.splitlines()
    wrong = json.loads(refused)
    assert wrong["custom_id"] == "line 5"
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
