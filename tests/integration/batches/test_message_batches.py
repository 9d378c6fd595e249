"""/v1/messages/batches by Anthropic's official client, against the service on a real port."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import asyncpg
import pytest
from anthropic import AsyncAnthropic

from tests.conftest import Service
from tests.integration.support import (
    anthropic_client,
    assert_anthropic_error,
    openai_client,
    until,
)

PATH = "/v1/messages/batches"


@pytest.fixture
async def client(chatting: Service) -> AsyncIterator[AsyncAnthropic]:
    async with anthropic_client(chatting) as one:
        yield one


def asked(custom_id: str, prompt: str, **members: Any) -> Any:
    params = {
        "model": "scripted",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": prompt}],
    }
    return {"custom_id": custom_id, "params": params | members}


async def end_of(client: AsyncAnthropic, batch_id: str) -> Any:
    async def ended() -> Any:
        found = await client.messages.batches.retrieve(batch_id)
        return found if found.processing_status == "ended" else None

    return await until(ended, 60)


async def results_of(client: AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    return {
        one.custom_id: one.result async for one in await client.messages.batches.results(batch_id)
    }


async def test_a_batch_of_messages(
    chatting: Service, client: AsyncAnthropic, connection: asyncpg.Connection
) -> None:
    requests = [asked(f"c{number}", f"prompt {number}") for number in range(30)]
    requests[7] = asked("c7", "x", max_tokens=0)
    requests[8] = asked("c8", "x", model="nobody")
    requests[9] = asked("c9", "{{chunks=3 fail_at=1}}")
    requests[10] = asked("c10", "{{text=one END}}", stop_sequences=["END"])
    batch = await client.messages.batches.create(requests=requests)
    assert (batch.type, batch.processing_status) == ("message_batch", "in_progress")
    assert (batch.request_counts.processing, batch.results_url) == (30, None)
    ended = await end_of(client, batch.id)
    counts = ended.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 27, 3)
    assert ended.ended_at
    assert ended.cancel_initiated_at is None
    found = await results_of(client, batch.id)
    assert found.keys() == {f"c{number}" for number in range(30)}
    assert {name for name, one in found.items() if one.type == "errored"} == {"c7", "c8", "c9"}
    kinds = [found[name].error.error.type for name in ("c7", "c8", "c9")]
    assert kinds == ["invalid_request_error", "not_found_error", "api_error"]
    message = found["c10"].message
    assert (message.content[0].text, message.stop_sequence) == ("one ", "END")
    result = await chatting.client.get(f"/results/{found['c0'].message.id.removeprefix('msg_')}")
    assert result.json()["result"] == found["c0"].message.content[0].text
    deleted = await client.messages.batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    for reading in (client.messages.batches.retrieve, client.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            await reading(batch.id)
    assert await connection.fetchval("SELECT count(*) FROM files") == 0
    assert await connection.fetchval("SELECT count(*) FROM results") == 28


async def test_a_batch_is_cancelled(chatting: Service, client: AsyncAnthropic) -> None:
    requests = [asked("fast", "{{chunks=1}}")]
    requests += [asked(f"slow{n}", "{{chunks=300 delay_ms=100}}", max_tokens=300) for n in range(3)]
    batch = await client.messages.batches.create(requests=requests)

    async def has_begun() -> bool:
        answer = await chatting.client.get("/results/", params={"state": "completed"})
        return bool(answer.json())

    await until(has_begun)
    with pytest.raises(anthropic.ConflictError):
        await client.messages.batches.delete(batch.id)
    early = await chatting.client.get(f"{PATH}/{batch.id}/results")
    assert_anthropic_error(early, 409, "conflict")
    stopped = await client.messages.batches.cancel(batch.id)
    assert stopped.processing_status == "canceling"
    assert stopped.cancel_initiated_at
    ended = await end_of(client, batch.id)
    found = await results_of(client, batch.id)
    assert [found[f"slow{n}"].type for n in range(3)] == ["canceled"] * 3
    assert found["fast"].type == "succeeded"
    counts = ended.request_counts
    assert (counts.succeeded, counts.canceled, counts.errored) == (1, 3, 0)


async def test_lists_are_of_this_dialect_and_paged_both_ways(
    chatting: Service, client: AsyncAnthropic
) -> None:
    made = [
        (await client.messages.batches.create(requests=[asked("a", "{{chunks=1}}")])).id
        for _ in range(5)
    ]
    listed = [one.id async for one in client.messages.batches.list(limit=2)]
    assert listed == made[::-1]
    page = await client.messages.batches.list(before_id=made[0], limit=2)
    assert [one.id for one in page.data] == [made[2], made[1]]
    assert page.has_more
    async with openai_client(chatting) as other:
        assert [one async for one in other.batches.list()] == []
        theirs = await chatting.client.get(f"/v1/batches/{made[0].replace('msgbatch_', 'batch_')}")
        assert theirs.status_code == 404
    for batch_id in made:
        await end_of(client, batch_id)


async def test_a_repeated_key_returns_the_first_batch(
    client: AsyncAnthropic, connection: asyncpg.Connection
) -> None:
    headers = {"Idempotency-Key": "k"}
    requests = [asked("a", "{{chunks=1}}")]
    first = await client.messages.batches.create(requests=requests, extra_headers=headers)
    again = await client.messages.batches.create(requests=requests, extra_headers=headers)
    assert again.id == first.id
    with pytest.raises(anthropic.ConflictError):
        await client.messages.batches.create(
            requests=[asked("b", "{{chunks=1}}")], extra_headers=headers
        )
    await end_of(client, first.id)
    assert await connection.fetchval("SELECT count(*) FROM files WHERE purpose = 'batch'") == 1


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests"),
        ([asked("a", "x"), asked("a", "y")], "another request's"),
        ([asked("a b", "x")], "custom_id"),
        ([asked("a", "x", stream=True)], "stream has no meaning"),
        ([{"custom_id": "a"}], "requests.0.params"),
        ([asked("a", "x", top_k=2**64)], "integers must fit 64 bits"),
        ([asked("a", "x", other=json.loads("[" * 130 + "]" * 130))], "nested deeper"),
    ],
)
async def test_wrong_batches_are_refused(chatting: Service, requests: Any, words: str) -> None:
    answer = await chatting.client.post(PATH, json={"requests": requests})
    error = assert_anthropic_error(answer, 400, "invalid_request")
    assert words in error["message"]
