"""OpenAI's official client, unmodified, against the service on real vLLM."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service
from tests.constraints import ENFORCED, NOT_ENFORCED
from tests.integration.support import serve

pytestmark = pytest.mark.timeout(300)

ASKED: Any = {
    "model": "demo",
    "messages": [
        {"role": "developer", "content": "Helpers."},
        {"role": "user", "content": "Write a function that adds."},
    ],
    "max_tokens": 24,
    "temperature": 0,
}


@contextlib.asynccontextmanager
async def speak_to(settings: Settings) -> AsyncIterator[tuple[Service, AsyncOpenAI]]:
    """A service behind a real socket, and the official client of it."""
    async with serve(settings, with_worker=True) as service:
        base = str(service.client.base_url).rstrip("/") + "/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield service, client


async def test_greedy_text_is_the_native_one_and_the_engines_own(
    vllm_settings: Settings, vllm_triton: EmbeddedTriton
) -> None:
    async with speak_to(vllm_settings) as (service, client):
        chat = await client.chat.completions.create(**ASKED)
        text = chat.choices[0].message.content
        assert text
        native = await service.client.post(
            "/results/",
            json={
                "model": "demo",
                "messages": ASKED["messages"],
                "parameters": {"max_tokens": 24, "temperature": 0},
            },
            headers={"Prefer": "wait=60"},
        )
        assert native.json()["result"] == text
        assert chat.usage is not None
        assert native.json()["usage"]["prompt_tokens"] == chat.usage.prompt_tokens
        model = await service.services.registry.find("demo")
        assert model.format is not None
        prompt = await model.format.render(ASKED["messages"])
        assert chat.usage.prompt_tokens == await model.format.count_tokens(prompt)
        completion = await client.completions.create(
            model="demo", prompt=prompt, max_tokens=24, temperature=0
        )
        assert completion.choices[0].text == text
        tokens = model.format.tokenizer.encode(prompt).ids if model.format.tokenizer else []
        of_tokens = await client.completions.create(
            model="demo", prompt=tokens, max_tokens=24, temperature=0
        )
        assert of_tokens.choices[0].text == text
        assert of_tokens.usage == completion.usage
    async with vllm_triton.client() as triton:
        parts = [
            delta.text
            async for delta in triton.generate("demo", prompt, {"max_tokens": 24, "temperature": 0})
        ]
    assert "".join(parts) == text


async def test_streams_of_both_clients(vllm_settings: Settings) -> None:
    async with speak_to(vllm_settings) as (_, client):
        whole = await client.chat.completions.create(**ASKED, n=2)
        stream = await client.chat.completions.create(
            **ASKED, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts = ["", ""]
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
        assert usage == whole.usage

        def read() -> str:
            with OpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
                chunks = other.chat.completions.create(**ASKED, stream=True)
                return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

        assert await asyncio.to_thread(read) == texts[0]


async def test_log_probabilities_are_the_engines(
    vllm_settings: Settings, vllm_triton: EmbeddedTriton
) -> None:
    asked = {"max_tokens": 8, "temperature": 1.5, "seed": 5, "logprobs": 3}
    async with vllm_triton.client() as triton:
        lists = [d.logprobs async for d in triton.generate("demo", "def ", asked)]
    direct = [token for one in lists for token in json.loads(one or "[]")]
    async with speak_to(vllm_settings) as (_, client):
        body: Any = {"model": "demo", "prompt": "def ", **asked}
        whole = (await client.completions.create(**body)).choices[0].logprobs
        assert whole is not None
        sampled = [next(iter(token.values())) for token in direct]
        assert whole.tokens == [entry["decoded_token"] for entry in sampled]
        assert whole.token_logprobs == [entry["logprob"] for entry in sampled]
        assert whole.top_logprobs is not None
        for place, entries in enumerate(direct):
            expected = {e["decoded_token"]: e["logprob"] for e in entries.values()}
            assert whole.top_logprobs[place] == expected
        assert any(entry["rank"] > 1 for entry in sampled), "a test of the order needs one"
        streamed: list[str] = []
        async for chunk in await client.completions.create(**body, stream=True):
            streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.tokens) or []
        assert streamed == whole.tokens
        chat = await client.chat.completions.create(**ASKED | {"logprobs": True, "top_logprobs": 2})
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content
        assert content
        for token in content:
            first, second = token.top_logprobs
            assert (token.token, token.logprob) == (first.token, first.logprob)  # greedy
            assert first.logprob >= second.logprob


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "("},
        {"regex": "(a{1,4000}){1,4000}"},
        {"grammar": "root ::= ("},
        {"json": {"$ref": "#/$defs/nothing"}},
        {"json": {"type": "string", "pattern": "(?<=a)b", "minLength": 100_000_000}},
        {"json": {"type": "array", "minItems": 10_000_000}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    ],
)
async def test_a_constraint_that_makes_no_sense_does_no_harm(
    vllm_settings: Settings, constraint: dict[str, Any]
) -> None:
    """It is refused, or ignored in part, and the engine goes on."""
    async with speak_to(vllm_settings) as (_, client):
        is_nonsense = "(" in (constraint.get("regex"), constraint.get("grammar", "")[-1:])
        refusal = pytest.raises if is_nonsense else contextlib.suppress
        with refusal(openai.BadRequestError):
            await client.completions.create(
                model="demo",
                prompt="x",
                max_tokens=4,
                timeout=60,
                extra_body={"structured_outputs": constraint},
            )
        answer = await client.completions.create(model="demo", prompt="x", max_tokens=4)
        assert answer.choices[0].finish_reason in ("stop", "length")


async def test_a_text_follows_its_constraint_or_the_constraint_is_refused_by_name(
    vllm_settings: Settings,
) -> None:
    async with speak_to(vllm_settings) as (_, client):

        async def complete(constraint: Any) -> str:
            answer = await client.completions.create(
                model="demo", prompt="x", max_tokens=100, temperature=0,
                extra_body={"structured_outputs": constraint},
            )  # fmt: skip
            return answer.choices[0].text

        for constraint, reason in NOT_ENFORCED:
            with pytest.raises(openai.BadRequestError, match=re.escape(reason)):
                await complete(constraint)
        for schema, values in ENFORCED:
            text = await complete({"json": schema})
            assert json.loads(text) in values, text


async def test_a_grammar_that_slows_the_engine_ends_and_the_others_go_on(
    vllm_settings: Settings,
) -> None:
    """Each token of it takes longer than the one before; it would have 900."""
    settings = vllm_settings.model_copy(update={"ebnf_grammars": True})
    async with speak_to(settings) as (_, client):
        asked: dict[str, Any] = {"model": "demo", "prompt": "def f", "temperature": 0}
        alone = await client.completions.create(**asked, max_tokens=100)
        ambiguous = {"structured_outputs": {"grammar": 'root ::= root root | "a" | ""'}}
        slow, beside = await asyncio.gather(
            client.completions.create(**asked, max_tokens=900, extra_body=ambiguous),
            client.completions.create(**asked, max_tokens=100),
            return_exceptions=True,
        )
        assert isinstance(slow, openai.BadRequestError)
        assert slow.code == "grammar_too_slow"
        assert not isinstance(beside, BaseException)
        assert beside.choices[0].text == alone.choices[0].text


async def test_each_choice_of_tokens_has_its_effect(vllm_settings: Settings) -> None:
    async with speak_to(vllm_settings) as (service, client):
        shown = (await service.client.get("/models/demo")).json()
        assert shown["default_parameters"] == {}  # its generation_config.json has none
        model = await service.services.registry.find("demo")
        assert model.format is not None
        tokenizer = model.format.tokenizer
        assert tokenizer is not None
        a, b = (tokenizer.encode(one, add_special_tokens=False).ids[0] for one in "xy")

        async def text(extra: dict[str, Any], **members: Any) -> str:
            asked: Any = {"model": "demo", "prompt": "def f", "max_tokens": 12, "seed": 1}
            extra = {"ignore_eos": True} | extra
            answer = await client.completions.create(**asked | members, extra_body=extra)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 12
            return str(answer.choices[0].text)

        greedy = await text({}, temperature=0)
        assert set(await text({"allowed_token_ids": [a, b]}, temperature=2)) == {"x", "y"}
        assert await text({}, logit_bias={str(a): 100}) == "x" * 12
        assert await text({"allowed_token_ids": [a, b]}, logit_bias={str(b): 100}) == "y" * 12
        assert await text({"min_p": 1.0}, temperature=2) == greedy
        assert await text({"top_k": 1}, temperature=2) == greedy
        assert await text({}, temperature=2) != greedy
        word = greedy.split()[0]
        assert word not in await text({"bad_words": [word]}, temperature=0)
        out_of_range = {"allowed_token_ids": [2**31 - 1]}
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
            await text(out_of_range)
