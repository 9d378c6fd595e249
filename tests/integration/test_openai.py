"""OpenAI's dialect through its official client, unmodified, against a real socket."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from app.embedded.triton import EmbeddedTriton
from app.settings import Settings
from tests.conftest import Service, make_settings
from tests.integration.support import serve, write_model
from tests.postgres import PostgresServer

TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}] {% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'robot' %}"
    "{{ raise_exception('no robots') }}{% endif %}"
    "<{{ message.role }}> {{ message.content }} "
    "{% for call in message.tool_calls %}<tool_call> {{ call.function | tojson }} </tool_call> "
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO: Any = [{"role": "user", "content": "hello"}]


def say(text: str) -> Any:
    """Messages that the scripted model answers with this text."""
    return [{"role": "user", "content": "{{text=" + text + "}}"}]


@pytest.fixture
def openai_settings(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> Settings:
    """A service whose scripted model has a chat template, and a length that is known."""
    write_model(tmp_path, "scripted", template=TEMPLATE, max_model_len=100_000)
    return make_settings(postgres_server, database_name, triton, model_repository=tmp_path)


@pytest.fixture
async def served(openai_settings: Settings) -> AsyncIterator[Service]:
    """API and worker behind a real socket."""
    async with serve(openai_settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def client(served: Service) -> AsyncIterator[AsyncOpenAI]:
    """The official client; it does not try again, so that each answer is seen."""
    async with AsyncOpenAI(
        base_url=str(served.client.base_url).rstrip("/") + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def native(served: Service, identifier: str) -> dict[str, Any]:
    """The native result of an id in OpenAI's form."""
    answer = await served.client.get(f"/results/{identifier.partition('-')[2]}")
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def test_chat(served: Service, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="scripted", messages=HELLO, max_completion_tokens=5, metadata={"for": "test"}
    )
    (choice,) = answer.choices
    result = await native(served, answer.id)
    assert choice.message.content == result["result"]
    assert choice.finish_reason == "length" == result["finish_reason"]
    assert (choice.message.role, choice.message.tool_calls) == ("assistant", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(["<user>", "hello", "<assistant>"])
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8)
    assert (answer.object, answer.model) == ("chat.completion", "scripted")
    assert result["metadata"] == {"for": "test"}


async def test_a_stream_is_the_whole_answer_in_pieces(client: AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": HELLO, "max_tokens": 6, "seed": 3}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    first, *deltas, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == whole.choices[0].message.content
    assert len(deltas) > 1
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *deltas])
    assert end.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


async def test_completions(served: Service, client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="scripted", prompt="once", echo=True)
    result = await native(served, answer.id)
    assert answer.choices[0].text == "once" + result["result"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16  # OpenAI's default
    stream = await client.completions.create(
        model="scripted", prompt="once", echo=True, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_models(client: AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == ["scripted"]
    model = await client.models.retrieve("scripted")
    assert model == models.data[0]
    assert model.object == "model"
    assert model.to_dict()["max_model_len"] == 100_000
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


async def test_an_unknown_model(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.type == "invalid_request_error"
