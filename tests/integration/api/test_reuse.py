"""Exact reuse by the official clients, unmodified: Anthropic's, TGI's and OpenAI's, alone and in batches."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import anthropic
import asyncpg
import pytest
import text_generation
from anthropic import AsyncAnthropic
from huggingface_hub import InferenceClient
from openai import AsyncOpenAI

from tests.conftest import Service
from tests.integration.support import (
    anthropic_client,
    openai_client,
    read,
    until,
)

T = TypeVar("T")
PROMPT = "x {{chunks=3}}"
GREEDY = {"temperature": 0, "reuse": True}
HEADERS = {"X-Reuse": "true"}


@pytest.fixture
async def messages(chatting: Service) -> AsyncIterator[AsyncAnthropic]:
    async with anthropic_client(chatting) as client:
        yield client


@pytest.fixture
async def openai(chatting: Service) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(chatting) as client:
        yield client


def url_of(service: Service) -> str:
    return str(service.client.base_url).rstrip("/")


async def apart(call: Callable[[], T]) -> T:
    """A client that blocks, beside the loop that serves it."""
    return await asyncio.to_thread(call)


async def source_of(service: Service, wire_id: str) -> str | None:
    """The source of a result, by its id in a dialect; None if it ran."""
    result = await read(service, wire_id.partition("_")[2] or wire_id)
    assert result["state"] == "completed"
    assert (result["attempt"] == 0) == ("reused_from" in result)
    return result.get("reused_from")


async def newest(service: Service, count: int) -> list[dict[str, Any]]:
    """The newest results, oldest first."""
    answer = await service.client.get("/results/", params={"limit": count})
    found: list[dict[str, Any]] = answer.json()[::-1]
    assert len(found) == count
    return found


# --- Anthropic ------------------------------------------------------------------------------------


async def message(client: AsyncAnthropic, **extra: Any) -> Any:
    """A message, and the response's header that names its source."""
    raw = await client.messages.with_raw_response.create(
        model="scripted", max_tokens=8, messages=[{"role": "user", "content": PROMPT}], extra_body=extra
    )  # fmt: skip
    return await raw.parse(), raw.headers.get("x-reused-from")


async def test_messages_of_anthropics_client(chatting: Service, messages: AsyncAnthropic) -> None:
    source, named = await message(messages, **GREEDY)
    assert named is None
    again, named = await message(messages, **GREEDY)
    assert again.id != source.id
    assert named == source.id.removeprefix("msg_") == await source_of(chatting, again.id)
    for member in ("content", "stop_reason", "usage"):
        assert getattr(again, member) == getattr(source, member)
    for extra in ({"temperature": 0}, {"temperature": 0, "reuse": False}, {"reuse": True}):
        other, named = await message(messages, **extra)
        assert named is None
        assert await source_of(chatting, other.id) is None
    with pytest.raises(anthropic.BadRequestError, match="reuse"):
        await message(messages, temperature=0, reuse="yes")


async def test_streams_of_anthropics_client(chatting: Service, messages: AsyncAnthropic) -> None:
    source, _ = await message(messages, **GREEDY)
    async with messages.messages.stream(
        model="scripted", max_tokens=8, messages=[{"role": "user", "content": PROMPT}],
        extra_body=GREEDY,
    ) as stream:  # fmt: skip
        streamed = await stream.get_final_message()
    assert streamed.content[0].text == source.content[0].text  # type: ignore[union-attr]
    assert await source_of(chatting, streamed.id) == source.id.removeprefix("msg_")


async def test_a_batch_of_messages(chatting: Service, messages: AsyncAnthropic) -> None:
    source, _ = await message(messages, **GREEDY)
    params: Any = {
        "model": "scripted", "max_tokens": 8, "messages": [{"role": "user", "content": PROMPT}],
    }  # fmt: skip
    batch = await messages.messages.batches.create(
        requests=[
            {"custom_id": "reused", "params": params | GREEDY},
            {"custom_id": "run", "params": params | {"temperature": 0}},
        ]
    )

    async def ended() -> bool:
        found = await messages.messages.batches.retrieve(batch.id)
        return found.processing_status == "ended"

    await until(ended, 60)
    results: Any = {
        one.custom_id: one.result async for one in await messages.messages.batches.results(batch.id)
    }
    reused, run = results["reused"].message, results["run"].message
    assert await source_of(chatting, reused.id) == source.id.removeprefix("msg_")
    assert reused.content == run.content == source.content
    assert await source_of(chatting, run.id) is None


# --- TGI ------------------------------------------------------------------------------------------


async def test_hugging_faces_client(chatting: Service) -> None:
    """It sends no members of its own; its constructor takes headers."""
    client = InferenceClient(model=url_of(chatting), headers=HEADERS)

    def generate(**options: Any) -> Any:
        return client.text_generation(PROMPT, max_new_tokens=8, **options)

    first = await apart(generate)
    assert await apart(generate) == first
    source, again = await newest(chatting, 2)
    assert again["reused_from"] == source["id"]
    seeded = await apart(lambda: generate(do_sample=True, seed=7, details=True))
    repeated = await apart(lambda: generate(do_sample=True, seed=7, details=True))
    assert repeated == seeded
    source, again = await newest(chatting, 2)
    assert again["reused_from"] == source["id"]
    pieces = await apart(lambda: list(generate(do_sample=True, seed=7, stream=True, details=True)))
    assert pieces[-1].generated_text == seeded.generated_text
    tokens = [(token.id, token.logprob) for token in seeded.details.tokens]
    assert [(one.token.id, one.token.logprob) for one in pieces] == tokens != []
    (streamed,) = await newest(chatting, 1)
    assert streamed["reused_from"] == source["id"]


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")
async def test_the_text_generation_client(chatting: Service) -> None:
    plain = text_generation.Client(url_of(chatting), timeout=60)
    reusing = text_generation.AsyncClient(url_of(chatting), headers=HEADERS, timeout=60)
    await apart(lambda: plain.generate(PROMPT, max_new_tokens=8))
    first = await reusing.generate(PROMPT, max_new_tokens=8)  # the plain one answers no other
    second = await reusing.generate(PROMPT, max_new_tokens=8)
    assert second.generated_text == first.generated_text
    _, source, again = await newest(chatting, 3)
    assert "reused_from" not in source
    assert again["reused_from"] == source["id"]


async def test_the_member_goes_before_the_header(
    chatting: Service, connection: asyncpg.Connection
) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}

    async def generate(path: str = "/generate", **members: Any) -> Any:
        answer = await chatting.client.post(path, json=body | members, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    headers: dict[str, str] = {}
    source = await generate(reuse=True)
    assert "x-reused-from" not in source.headers
    reused = await generate(reuse=True)
    assert reused.headers["x-reused-from"] == source.headers["x-result-id"]
    assert reused.json() == source.json()
    assert reused.headers["x-generated-tokens"] == source.headers["x-generated-tokens"]
    at_root = await generate("/", reuse=True)
    assert at_root.headers["x-reused-from"] == source.headers["x-result-id"]
    headers = {"X-Reuse": "TRUE"}
    assert "x-reused-from" in (await generate()).headers
    assert "x-reused-from" not in (await generate(reuse=False)).headers
    # Several texts, and a seed of the service's choice: samples of their own, which answer no others.
    count = "SELECT count(*) FROM results WHERE reuse_digest IS NOT NULL"
    before = await connection.fetchval(count)
    for parameters in ({"do_sample": True, "best_of": 2}, {"do_sample": True}):
        for _ in range(2):
            answer = await generate(parameters=parameters | {"max_new_tokens": 8})
            assert "x-reused-from" not in answer.headers
    assert await connection.fetchval(count) == before == 4
    for wrong in ({"X-Reuse": "1"}, {"X-Reuse": ""}):
        refused = await chatting.client.post("/generate", json=body, headers=wrong)
        assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
        assert "X-Reuse" in refused.json()["error"]
    refused = await chatting.client.post("/generate", json=body | {"reuse": "yes"})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")


# --- OpenAI ---------------------------------------------------------------------------------------


async def test_responses_of_openais_client(chatting: Service, openai: AsyncOpenAI) -> None:
    async def create(**members: Any) -> Any:
        return await openai.responses.create(
            model="scripted", input=PROMPT, temperature=0, max_output_tokens=16, **members
        )

    source = await create(extra_body={"reuse": True})
    assert await source_of(chatting, source.id) is None
    again = await create(extra_body={"reuse": True})
    assert await source_of(chatting, again.id) == source.id.removeprefix("resp_")
    assert (again.output_text, again.usage) == (source.output_text, source.usage)
    assert await source_of(chatting, (await create()).id) is None
    events = [event async for event in await create(stream=True, extra_body={"reuse": True})]
    done = events[-1].response
    assert (done.status, done.output_text) == ("completed", source.output_text)
    assert await source_of(chatting, done.id) == source.id.removeprefix("resp_")
    later = await create(background=True, extra_body={"reuse": True})
    assert await source_of(chatting, later.id) == source.id.removeprefix("resp_")
    assert (await openai.responses.retrieve(later.id)).output_text == source.output_text


async def test_lines_of_a_batch(chatting: Service, openai: AsyncOpenAI) -> None:
    chat = {"model": "scripted", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    bodies = {
        "a": chat | GREEDY,
        "b": chat | {"temperature": 0},
        "c": chat | {"reuse": True, "seed": 4, "n": 2},
    }
    lines = [
        {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for key, body in bodies.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()

    async def run_batch() -> dict[str, Any]:
        file = await openai.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await openai.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def ended() -> Any:
            found = await openai.batches.retrieve(batch.id)
            return found if found.status == "completed" else None

        output = (await until(ended, 60)).output_file_id
        read_lines = (await openai.files.content(output)).content.splitlines()
        return {one["custom_id"]: one["response"]["body"] for one in map(json.loads, read_lines)}

    first, second = await run_batch(), await run_batch()
    for key in bodies:
        assert second[key]["choices"] == first[key]["choices"]
        assert second[key]["usage"] == first[key]["usage"]
        assert second[key]["id"] != first[key]["id"]
    found = await newest(chatting, 8)
    by_id = {one["id"]: one for one in found}
    assert by_id.keys() >= {one["id"].removeprefix("chatcmpl-") for one in first.values()}
    assert [one.get("reused_from") for one in found[:4]] == [None] * 4
    assert sum("reused_from" in one for one in found[4:]) == 3  # not b
    a, b = (second[key]["id"].removeprefix("chatcmpl-") for key in ("a", "b"))
    assert by_id[a]["reused_from"] == first["a"]["id"].removeprefix("chatcmpl-")
    assert "reused_from" not in by_id[b]
