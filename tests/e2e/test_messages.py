"""Anthropic's official client, unmodified, against the service on real vLLM."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.support import anthropic_client, serve

pytestmark = pytest.mark.timeout(300)

ASKED: Any = {
    "model": "demo",
    "system": "Helpers.",
    "messages": [{"role": "user", "content": "Write a function that adds."}],
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}


@contextlib.asynccontextmanager
async def speak_to(settings: Settings) -> AsyncIterator[tuple[Service, AsyncAnthropic]]:
    """A service behind a real socket, and the official client of it."""
    async with serve(settings, with_worker=True) as service, anthropic_client(service) as client:
        yield service, client


async def test_a_message_and_its_stream_have_the_native_text(vllm_settings: Settings) -> None:
    async with speak_to(vllm_settings) as (service, client):
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            streamed = await stream.get_final_message()
        stored = await service.client.get(f"/results/{whole.id.removeprefix('msg_')}")
        text = stored.json()["result"]
        assert whole.content[0].to_dict() == {"type": "text", "text": text, "citations": None}
        assert streamed.content[0].text == text  # type: ignore[union-attr]
        assert streamed.usage == whole.usage
        counted = await client.messages.count_tokens(
            model="demo", system=ASKED["system"], messages=ASKED["messages"]
        )
        assert counted.input_tokens == whole.usage.input_tokens


async def test_a_stop_sequence_ends_the_text(vllm_settings: Settings) -> None:
    async with speak_to(vllm_settings) as (_, client):
        whole = await client.messages.create(**ASKED)
        text = whole.content[0].text
        stop = text[len(text) // 2 :][:3]
        assert stop
        ended = await client.messages.create(**ASKED, stop_sequences=["never so", stop])
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
        before = text[: text.index(stop)]
        got = "".join(block.text for block in ended.content if block.type == "text")
        assert got.strip() == before.strip()
        async with client.messages.stream(**ASKED, stop_sequences=[stop]) as stream:
            streamed = await stream.get_final_message()
        assert streamed.stop_sequence == stop
        assert "".join(b.text for b in streamed.content if b.type == "text") == got
