"""OpenAI's dialect through its official client, unmodified, against a real socket."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import openai
import pytest
import text_generation
from huggingface_hub import InferenceClient
from openai import AsyncOpenAI
from pydantic import SecretStr

from app.api.openai.schemas import SYSTEM_FINGERPRINT
from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from app.queue.team_limits import ANY_MODEL
from tests.conftest import Service, make_settings
from tests.integration.support import (
    assert_openai_error,
    count_rows,
    read,
    serve,
    until,
    write_model,
)
from tests.postgres import PostgresServer
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import sign

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
    return [{"role": "user", "content": "{{text=" + text + " }}"}]


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
    assert choice.message.to_dict() == {
        "role": "assistant",
        "content": result["result"],
        "refusal": None,
        "annotations": [],
    }
    assert choice.finish_reason == "length" == result["finish_reason"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(["<user>", "hello", "<assistant>"])
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8)
    assert (answer.object, answer.model) == ("chat.completion", "scripted")
    assert result["metadata"] == {"for": "test"}


@pytest.mark.trial
async def test_a_stream_is_the_whole_answer_in_pieces(client: AsyncOpenAI) -> None:
    slow: Any = [{"role": "user", "content": "{{delay_ms=20}}"}]
    asked: Any = {"model": "scripted", "messages": slow, "max_tokens": 120, "seed": 3}
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
    assert model.created > 1_700_000_000
    assert model.to_dict()["max_model_len"] == 100_000
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


async def test_an_unknown_model(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.type == "invalid_request_error"


# text_generation itself calls pydantic by older names.
@pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")
async def test_tgi_clients_name_no_model(served: Service, client: AsyncOpenAI) -> None:
    """huggingface_hub sends `dummy`, text_generation `tgi`, others nothing."""
    url = str(served.client.base_url).rstrip("/")
    hub = InferenceClient(model=url)
    answered = await asyncio.to_thread(hub.chat_completion, messages=say("hi"))
    assert answered.choices[0].message.content == "hi"
    assert (answered.model, answered.system_fingerprint) == ("scripted", SYSTEM_FINGERPRINT)
    tgi = text_generation.Client(url)
    messages = [text_generation.types.Message(**one) for one in say("hi")]
    whole: Any = await asyncio.to_thread(tgi.chat, messages)
    assert (whole.choices[0].message.content, whole.model) == ("hi", "scripted")
    body = {"messages": HELLO, "stream": True, "max_tokens": 1}
    chunks = await served.client.post("/v1/chat/completions", json=body)
    assert f'"system_fingerprint":"{SYSTEM_FINGERPRINT}"' in chunks.text
    text = await served.client.post("/v1/completions", json={"prompt": "p"})
    assert text.json()["model"] == "scripted"
    assert text.json()["system_fingerprint"] == SYSTEM_FINGERPRINT


async def test_choices_and_prompts_are_rows_of_one_group(
    served: Service, client: AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    answer = await client.completions.with_raw_response.create(
        model="scripted", prompt=["one", "two words"], n=3, seed=7, max_tokens=4
    )
    parsed = answer.parse()
    ids = answer.headers["x-result-id"].split(", ")
    assert len(ids) == 6
    rows = await connection.fetch("SELECT id, group_id, output FROM results ORDER BY id")
    assert {str(row["group_id"]) for row in rows} == {ids[0]} == {parsed.id.partition("-")[2]}
    texts = {str(row["id"]): row["output"] for row in rows}
    assert [choice.text for choice in parsed.choices] == [texts[one] for one in ids]
    assert [choice.index for choice in parsed.choices] == list(range(6))
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens == 1 + 2  # each prompt once
    assert parsed.usage.completion_tokens == 6 * 4
    stream = await client.completions.create(
        model="scripted",
        prompt=["one", "two words"],
        n=3,
        seed=7,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    streamed, usage = [""] * 6, None
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
        usage = chunk.usage
    assert streamed == [choice.text for choice in parsed.choices]
    assert usage == parsed.usage


async def test_the_best_of_several_are_as_many_as_wanted(client: AsyncOpenAI) -> None:
    answer = await client.completions.with_raw_response.create(
        model="scripted", prompt="one", n=2, best_of=5, max_tokens=3
    )
    assert len(answer.headers["x-result-id"].split(", ")) == 5
    parsed = answer.parse()
    assert [choice.index for choice in parsed.choices] == [0, 1]
    assert parsed.choices[0].logprobs is None
    assert parsed.usage is not None
    assert parsed.usage.completion_tokens == 15  # all that was generated


async def test_stop_and_seed(client: AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": say("one two three four")}
    stopped = await client.chat.completions.create(**asked, stop=["three"])
    assert stopped.choices[0].message.content == "one two "
    assert stopped.choices[0].finish_reason == "stop"
    with_it = await client.chat.completions.create(
        **asked, stop="three", extra_body={"include_stop_str_in_output": True}
    )
    assert with_it.choices[0].message.content == "one two three"
    by_seed = [
        await client.chat.completions.create(model="scripted", messages=HELLO, seed=seed)
        for seed in (1, 1, 2)
    ]
    first, second, third = (answer.choices[0].message.content for answer in by_seed)
    assert first == second != third


async def test_log_probabilities(client: AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": say("a é 🙂"), "logprobs": True}
    chat = await client.chat.completions.create(**asked, top_logprobs=1)
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [token.token for token in content] == ["a", " é", " 🙂"]
    assert [token.bytes for token in content] == [list(t.encode()) for t in ("a", " é", " 🙂")]
    # The second one was chosen, but is not the likeliest.
    assert [token.top_logprobs[0].token for token in content] == ["a", " other1", " 🙂"]
    stream = await client.chat.completions.create(**asked, top_logprobs=1, stream=True)
    streamed = [
        token
        async for chunk in stream
        for token in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    ]
    assert streamed == content
    bare = await client.chat.completions.create(**asked)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    text = await client.completions.create(model="scripted", prompt="{{text=a é}}", logprobs=1)
    old = text.choices[0].logprobs
    assert old is not None
    assert old.tokens == ["a", " é"]
    assert old.text_offset == [0, 1]
    assert old.top_logprobs is not None
    assert [list(place) for place in old.top_logprobs] == [["a"], [" other1", " é"]]
    assert [place[token] for place, token in zip(old.top_logprobs, old.tokens, strict=True)] == (
        old.token_logprobs
    )


# --- Tools ----------------------------------------------------------------------------------------

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
CALLING = 'Well. <tool_call> {"name": "add", "arguments": {"a": 1} } </tool_call> '


async def test_tool_calls(served: Service, client: AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": say(CALLING * 2), "tools": TOOLS}
    answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well.Well."
    assert choice.message.tool_calls is not None
    one, two = choice.message.tool_calls
    assert one.type == "function"
    assert (one.function.name, one.function.arguments) == ("add", '{"a": 1}')
    assert one.id != two.id
    result = await native(served, answer.id)
    assert "<tool_call>" in result["result"]
    stored = await served.services.results.request("default", UUID(result["id"]))
    prompt = stored.prompt or ""
    assert prompt.startswith('[tools [{"type": "function", "function": {"name": "add"')
    stream = await client.chat.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert all(call.id and call.function and call.function.name == "add" for call in calls)
    assert [call.function and call.function.arguments for call in calls] == ['{"a": 1}'] * 2
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    single = await client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls or []) == 1


async def test_calls_and_their_answers_are_rendered(served: Service, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
    )  # fmt: skip
    request = await served.services.results.request("default", UUID(answer.id.partition("-")[2]))
    assert request.prompt == (
        "<system> a\nb <assistant>  <tool_call> "
        '{"name": "add", "arguments": {"a": 1}} </tool_call> <tool> 2 <assistant>'
    )


async def test_what_a_template_is_given(openai_settings: Settings) -> None:
    """vLLM's further members reach the template, and a final message can be gone on with."""
    template = openai_settings.model_repository / "scripted/1/chat_template.jinja"
    template.write_text(
        "{{ documents | tojson }} {{ mode }} {{ reasoning_effort }} "
        "{% for message in messages %}<{{ message.role }}> {{ message.content }} </s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    body = {
        "model": "scripted",
        "messages": [*HELLO, {"role": "assistant", "content": "It is"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"mode": "é"},
        "documents": [{"title": "<t>"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    async with serve(openai_settings, with_worker=True) as service:
        answer = await service.client.post("/v1/chat/completions", json=body)
        identifier = UUID(answer.headers["x-result-id"])
        request = await service.services.results.request("default", identifier)
    assert request.prompt == '[{"title": "<t>"}] é low <user> hello </s><assistant> It is'


async def test_what_looks_like_a_call_is_text_without_tools(client: AsyncOpenAI) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        asked: Any = {"model": "scripted", "messages": say(CALLING), **more}
        answer = await client.chat.completions.create(**asked)
        assert "<tool_call>" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"


async def test_forced_tools_are_schemas(served: Service, client: AsyncOpenAI) -> None:
    """The engine forces the text; the scripted one receives it as a parameter."""
    calls = '[{"name": "add", "parameters": {"a": 1} }]'
    answer = await client.chat.completions.create(
        model="scripted", messages=say(calls), tools=TOOLS, tool_choice="required"
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.to_dict()["function"] for call in answer.choices[0].message.tool_calls or []] == [
        {"name": "add", "arguments": '{"a": 1}'}
    ]
    parameters = (await native(served, answer.id))["parameters"]
    assert parameters["structured_outputs"]["json"]["minItems"] == 1
    named = await client.chat.completions.create(
        model="scripted",
        messages=say('{"a": 2}'),
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "add"}},
    )
    assert named.choices[0].finish_reason == "stop"  # as OpenAI documents it
    (call,) = named.choices[0].message.tool_calls or []
    assert call.to_dict()["function"] == {"name": "add", "arguments": '{"a": 2}'}
    parameters = (await native(served, named.id))["parameters"]
    assert parameters["structured_outputs"] == {"json": {"type": "object"}}


async def test_models_that_cannot_be_told_of_tools(
    openai_settings: Settings, tmp_path: Path
) -> None:
    async def refusal(choice: str) -> dict[str, Any]:
        async with serve(openai_settings) as service:
            answer = await service.client.post(
                "/v1/chat/completions",
                json={
                    "model": "scripted",
                    "messages": HELLO,
                    "tools": TOOLS,
                    "tool_choice": choice,
                },
            )
            return assert_openai_error(answer, 400, "invalid_request", "tools")

    template = tmp_path / "scripted/1/chat_template.jinja"
    template.write_text("{{ messages[0].content }}")
    assert "takes no tools" in (await refusal("auto"))["message"]
    template.write_text("{{ messages[0].content }}{{ tools }}")
    assert "chat.json" in (await refusal("auto"))["message"]
    (tmp_path / "scripted/chat.json").write_text('{"tool_call_format": "llama3_json"}')
    async with serve(openai_settings, with_worker=True) as service:
        answer = await service.client.post(
            "/v1/chat/completions",
            json={
                "model": "scripted",
                "messages": say('{"name": "add", "parameters": {} }'),
                "tools": TOOLS,
            },
        )
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text


# --- Errors ---------------------------------------------------------------------------------------


async def test_the_clients_exceptions(served: Service, client: AsyncOpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model="scripted", messages=HELLO, temperature=3)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_request")
    assert "2" in refused.value.message
    with pytest.raises(openai.BadRequestError) as no_robots:
        await create(model="scripted", messages=[{"role": "user", "content": "robot"}])
    assert "no robots" in no_robots.value.message
    assert no_robots.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as too_long:
        await create(model="scripted", messages=HELLO, max_tokens=100_000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError) as by_engine:
        await create(model="scripted", messages=[{"role": "user", "content": "{{refuse}}"}])
    assert "the script refuses" in by_engine.value.message
    with pytest.raises(openai.InternalServerError) as failed:
        await create(model="scripted", messages=[{"role": "user", "content": "{{fail_at=1}}"}])
    assert (failed.value.status_code, failed.value.type) == (502, "server_error")
    assert failed.value.response.headers["x-result-id"]
    with pytest.raises(openai.APIStatusError) as too_large:
        await create(model="scripted", messages=[{"role": "user", "content": "x" * 2_100_000}])
    assert (too_large.value.status_code, too_large.value.code) == (413, "body_too_large")
    keyed: Any = {"model": "scripted", "extra_headers": {"Idempotency-Key": "k"}}
    first = await create(messages=HELLO, **keyed)
    assert await create(messages=HELLO, **keyed) == first
    with pytest.raises(openai.ConflictError) as conflict:
        await create(messages=say("other"), **keyed)
    assert conflict.value.response.headers["x-should-retry"] == "false"


async def test_who_may_not_come_in_and_who_asks_too_much(openai_settings: Settings) -> None:
    guarded = openai_settings.model_copy(update={"jwt_secret": SecretStr(STRONG)})
    async with serve(guarded, with_worker=True) as service:
        base = str(service.client.base_url).rstrip("/") + "/v1"
        async with AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
            assert (caught.value.code, caught.value.type) == (
                "invalid_api_key",
                "invalid_request_error",
            )
            unnamed = await service.client.post("/v1/chat/completions", json=CHAT)
            assert_openai_error(unnamed, 401, "invalid_api_key")
            client.api_key = sign({"team_id": "red", "token_id": "t1"})
            answer = await client.chat.completions.create(model="scripted", messages=HELLO)
            assert answer.choices[0].message.content
            await service.services.limits.set("red", ANY_MODEL, {"tokens_per_minute": 1})

            async def is_known() -> bool:
                limits = service.services.limits.of("red", "scripted")
                return limits.tokens_per_minute == 1

            await until(is_known)
            # A full bucket lets one through that needs more than it holds.
            await client.chat.completions.create(model="scripted", messages=HELLO)
            with pytest.raises(openai.RateLimitError) as too_much:
                await client.chat.completions.create(model="scripted", messages=HELLO)
            assert (too_much.value.code, too_much.value.type) == ("rate_limit_exceeded", "tokens")
            assert int(too_much.value.response.headers["retry-after"]) > 0


async def test_a_long_call_keeps_its_stream_alive(openai_settings: Settings) -> None:
    often = openai_settings.model_copy(update={"keep_alive_seconds": 0.05})
    words = '<tool_call> {"name": "' + "x " * 40
    messages = [{"role": "user", "content": "{{delay_ms=20 text=" + words + "}}"}]
    body = {"model": "scripted", "messages": messages, "tools": TOOLS, "stream": True}
    async with serve(often, with_worker=True) as service:
        answer = await service.client.post("/v1/chat/completions", json=body)
    assert b": keep-alive\n" in answer.content
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_model_without_a_template_has_no_chat(openai_settings: Settings) -> None:
    (openai_settings.model_repository / "scripted/1/chat_template.jinja").unlink()
    async with serve(openai_settings) as service:
        answer = await service.client.post("/v1/chat/completions", json=CHAT)
        error = assert_openai_error(answer, 400, "invalid_request", "messages")
        assert "/v1/completions" in error["message"]


async def test_an_error_in_mid_stream_is_a_frame_and_the_end_is_told(
    served: Service, client: AsyncOpenAI
) -> None:
    messages: Any = [{"role": "user", "content": "{{fail_at=2 delay_ms=1}}"}]
    stream = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
    texts: list[str | None] = []

    async def read_all() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)  # noqa: PERF401 # as far as it comes

    with pytest.raises(openai.APIError, match="the script failed after 2 chunks") as caught:
        await read_all()
    assert len(texts) >= 2
    assert caught.value.type == "server_error"
    body = {"model": "scripted", "messages": messages, "stream": True}
    answer = await served.client.post("/v1/chat/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.trial
async def test_the_client_tries_a_model_again_that_is_not_ready(
    openai_settings: Settings, triton: EmbeddedTriton
) -> None:
    """503 with Retry-After: their client sends again by itself, and gets its answer."""
    async with serve(openai_settings, with_worker=True) as service:
        base = str(service.client.base_url).rstrip("/") + "/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=3) as client:
            await service.services.server_pool.get("default").client.unload("scripted")
            await service.services.registry.refresh()
            with pytest.raises(openai.InternalServerError) as caught:
                await client.with_options(max_retries=0).chat.completions.create(
                    model="scripted", messages=HELLO
                )
            assert (caught.value.status_code, caught.value.code) == (503, "model_not_ready")
            assert int(caught.value.response.headers["retry-after"]) > 0
            sending = asyncio.create_task(
                client.chat.completions.create(model="scripted", messages=HELLO)
            )
            await service.services.server_pool.get("default").client.load("scripted")
            await service.services.registry.refresh()
            assert (await sending).choices[0].message.content


async def test_a_client_that_leaves_cancels(
    served: Service, connection: asyncpg.Connection
) -> None:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "{{chunks=500 delay_ms=20}}"}],
        "n": 2,
        "stream": True,
        "max_tokens": 500,
    }
    for on_disconnect, expected in (("cancel", "cancelled"), ("continue", None)):
        async with served.client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"X-On-Disconnect": on_disconnect}
        ) as stream:
            ids = stream.headers["x-result-id"].split(", ")
            async for line in stream.aiter_lines():
                if '"content":"' in line:
                    break
        if expected is None:
            assert (await read(served, ids[0]))["state"] == "pending"
            await served.client.post(f"/results/{ids[0]}/cancel")
            await served.client.post(f"/results/{ids[1]}/cancel")
            continue
        for one in ids:
            result = await read(served, one, wait=60)
            assert result["error"]["code"] == expected


# --- Bad input ------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {"model": "scripted", "messages": HELLO}
TEXT: dict[str, Any] = {"model": "scripted", "prompt": "x"}


def schema_format(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def deep(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


BAD: list[tuple[str, dict[str, Any], str | None]] = [
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": "hello"}, "messages"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0]"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].images[0].url"),
    ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]}, "messages[0]"),
    ("chat", {"messages": [{"role": "assistant", "audio": {"id": "x"}, "content": "x"}]}, "messages[0].audio"),
    ("chat", {"response_format": {"type": "json"}}, "response_format"),
    ("chat", {"response_format": {"type": "json_object", "value": "{"}}, "response_format"),
    ("chat", {"response_format": {"type": "regex", "value": {}}}, "response_format"),
    ("chat", {"guided_json": r'{"const": "\u0000"}'}, None),
    ("chat", {"guided_json": {"const": "\x00"}}, None),
    ("chat", {"response_format": {"type": "json", "value": r'{"const": "\u0000"}'}}, "response_format"),
    ("chat", {"model": 5}, "model"),
    ("chat", {"temperature": 2.1}, "temperature"),
    ("chat", {"temperature": "0.5"}, "temperature"),
    ("chat", {"top_p": 0}, "top_p"),
    ("chat", {"n": 0}, "n"),
    ("chat", {"n": 129}, "n"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"max_completion_tokens": -1}, "max_completion_tokens"),
    ("chat", {"min_tokens": 20, "max_tokens": 10}, None),
    ("chat", {"stop": ["x"] * 17}, "stop"),
    ("chat", {"stop": [""]}, "stop[0]"),
    ("chat", {"seed": 2**63}, "seed"),
    ("chat", {"logit_bias": {"a": 1}}, None),
    ("chat", {"logit_bias": {"1": 101}}, "logit_bias[1]"),
    ("chat", {"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
    ("chat", {"bad_words": ["x" * 257]}, "bad_words[0]"),
    ("text", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("text", {"allowed_token_ids": [2**31]}, "allowed_token_ids[0]"),
    ("text", {"dry_multiplier": 0.8}, "dry_multiplier"),
    ("chat", {"xtc_probability": 0.1}, "xtc_probability"),
    ("text", {"response_format": {"type": "xml"}}, "response_format"),
    ("text", {"guided_json": {}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ("text", {"best_of": 129}, "best_of"),
    ("chat", {"top_logprobs": 5}, None),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"presence_penalty": -3}, "presence_penalty"),
    ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ("chat", {"metadata": {"x": "y" * 20_000}}, "metadata"),
    ("chat", {"priority": -1}, "priority"),
    ("chat", {"functions": [{"name": "f"}]}, "functions"),
    ("chat", {"modalities": ["text", "audio"]}, None),
    ("chat", {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("chat", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ("chat", {"chat_template_kwargs": {"x": "y" * 20_000}}, "chat_template_kwargs"),
    ("chat", {"chat_template_kwargs": {"x": 10**30}}, "chat_template_kwargs"),
    ("chat", {"continue_final_message": True}, "messages"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("chat", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}]}, "tools[0].function.parameters"),
    ("chat", {"tools": TOOLS * 513}, "tools"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tool_choice": "perhaps"}, "tool_choice"),
    ("chat", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ("chat", {"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format"),
    ("chat", schema_format({"type": "thing"}), "response_format"),
    ("chat", schema_format({"properties": [1]}), "response_format"),
    ("chat", schema_format({"anyOf": []}), "response_format"),
    ("chat", schema_format(deep(60)), "response_format"),
    ("chat", schema_format(deep(300)), None),
    ("chat", {"whatever": deep(300)}, None),
    ("chat", schema_format({"enum": ["x" * 70_000]}), "response_format"),
    ("chat", schema_format({"minimum": 10**20}), "response_format"),
    ("chat", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ("chat", {"structured_outputs": {"magic": 1}}, "structured_outputs.magic"),
    ("chat", {"guided_json": "{"}, None),
    ("chat", {"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs"),
    ("chat", {"guided_regex": "a", "response_format": {"type": "json_object"}}, "structured_outputs"),
    ("text", {"prompt": ""}, "prompt"),
    ("text", {"prompt": []}, "prompt"),
    ("text", {"prompt": {"a": 1}}, "prompt"),
    ("text", {"prompt": ["a", 5]}, "prompt"),
    ("text", {"prompt": [1, -1]}, "prompt"),
    ("text", {"prompt": [[1.5]]}, "prompt"),
    ("text", {"prompt": [999_999]}, "prompt"),  # no token of the model
    ("text", {"prompt": "a\x00"}, None),
    ("text", {"prompt": ["a"] * 1001}, "prompt"),
    ("text", {"prompt": ["a"] * 10, "n": 128}, None),
    ("text", {"suffix": "x"}, "suffix"),
    ("text", {"best_of": 2, "n": 3}, None),
    ("text", {"best_of": 2, "stream": True}, None),
    ("text", {"echo": True, "logprobs": 1, "stream": True}, None),
    ("text", {"max_tokens": 0}, None),
    ("text", {"max_tokens": 0, "echo": True, "stream": True}, None),
    ("text", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("text", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("chat", {"prompt_logprobs": 1, "stream": True}, None),
    ("text", {"logprobs": 6}, "logprobs"),
]  # fmt: skip


async def test_bad_input_is_refused_by_name_and_nothing_is_written(
    openai_settings: Settings, connection: asyncpg.Connection
) -> None:
    async with serve(openai_settings, with_worker=True) as service:
        for kind, members, param in BAD:
            path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
            body = (CHAT if kind == "chat" else TEXT) | members
            answer = await service.client.post(path, json=body)
            assert answer.status_code == 400, (members, answer.text)
            error = assert_openai_error(answer, 400)
            if param is not None:
                assert error["param"] == param, (members, error)
            else:
                assert error["message"], members
        texts = [b"{", b"[]", b"5", b"[" * 100_000, b'{"messages":' * 5_000, b"\xff\xfe", b""]
        for text in texts:
            answer = await service.client.post(
                "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
            )
            assert_openai_error(answer, 400)
        surrogate = b'{"model":"scripted","messages":[{"role":"user","content":"\\ud800"}]}'
        answer = await service.client.post(
            "/v1/chat/completions", content=surrogate, headers={"content-type": "application/json"}
        )
        assert_openai_error(answer, 400)
        many = CHAT | {"messages": HELLO * 10_001}
        assert_openai_error(
            await service.client.post("/v1/chat/completions", json=many), 400, param="messages"
        )
    assert await count_rows(connection) == (0, 0, 0)


@pytest.mark.trial
async def test_large_and_strange_input_is_answered(served: Service, client: AsyncOpenAI) -> None:
    """Ten thousand messages, every plane of Unicode, and headers of 100 kB."""
    many = await client.chat.completions.create(
        model="scripted", messages=HELLO * 10_000, max_tokens=2
    )
    assert many.usage is not None
    assert many.usage.prompt_tokens == 20_001
    planes = (
        "".join(chr(plane * 0x10000 + 0xABCD) for plane in range(17) if plane != 13)
        + "\u202e\ufeff"
    )
    text = await client.chat.completions.create(model="scripted", messages=say(planes))
    assert text.choices[0].message.content == planes
    stream = await client.chat.completions.create(
        model="scripted", messages=say(planes), stream=True
    )
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == planes
    answer = await served.client.post(
        "/v1/chat/completions", json=CHAT, headers={"X-Large": "x" * 100_000}
    )
    assert answer.status_code == 200
    assert (await client.models.list()).data
