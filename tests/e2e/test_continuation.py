"""Continuation of a lost generation by our vLLM backend, from the token ids of its output."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.triton_streams import ModelError, ask, collect, stream, text

pytestmark = pytest.mark.timeout(300)

PROMPT = "import os\n\n\ndef "
GREEDY = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
RETURNS: dict[str, Any] = {
    "return_token_ids": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}
END = 0  # the demo model's end token
# Tokens of the demo model, a byte each. The first five make "é", "ü" and "â", a character of three
# bytes, and a lot that is not UTF-8; biased, each has its turn.
BYTES = [128, 103, 121, 163, 96]
BIAS = {128: -4, 163: -2}
NUL = 189
IN_FLIGHT = 16


@dataclass
class Run:
    """One undisturbed generation."""

    sampling: dict[str, Any]
    responses: list[dict[str, Any]]

    @property
    def ids(self) -> list[int]:
        return [number for response in self.responses for number in response["token_ids"]]

    @property
    def text(self) -> str:
        return text(self.responses)

    def text_of(self, tokens: int) -> str:
        """The text that a client has with this many tokens."""
        received = ""
        for response in self.responses:
            tokens -= len(response["token_ids"])
            if tokens < 0:
                break
            received += response["text_output"][0]
        return received


async def run(triton: EmbeddedTriton, sampling: dict[str, Any]) -> Run:
    request = ask("demo", PROMPT, sampling, stream=True, **RETURNS)
    return Run(sampling, await collect(triton, request))


async def resume(
    triton: EmbeddedTriton, lost: Run, tokens: int, *, streams: bool = True, **changes: Any
) -> list[dict[str, Any]]:
    """The responses behind the first `tokens` tokens of a run."""
    request = ask(
        "demo",
        PROMPT,
        lost.sampling | changes,
        stream=streams,
        resume_token_ids=lost.ids[:tokens],
        resume_text=lost.text_of(tokens),
        **RETURNS,
    )
    return await collect(triton, request)


async def check_cut(triton: EmbeddedTriton, lost: Run, tokens: int, *, streams: bool) -> None:
    responses = await resume(triton, lost, tokens, streams=streams)
    assert lost.text_of(tokens) + text(responses) == lost.text, tokens
    assert [number for r in responses for number in r["token_ids"]] == lost.ids[tokens:]
    assert sum(r["num_output_tokens"][0] for r in responses) == len(lost.ids) - tokens
    assert {r["num_input_tokens"][0] for r in responses} == {8}
    assert {r["finish_reason"][0] for r in responses[:-1]} <= {"None"}
    assert responses[-1]["finish_reason"] == lost.responses[-1]["finish_reason"]
    assert len(responses) == 1 or streams


async def check_every_cut(triton: EmbeddedTriton, lost: Run) -> None:
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def check(tokens: int) -> None:
        async with limit:
            await check_cut(triton, lost, tokens, streams=tokens % 4 != 3)

    async with asyncio.TaskGroup() as checks:
        for tokens in range(len(lost.ids) + 1):
            checks.create_task(check(tokens))


async def test_a_greedy_answer_is_the_same_from_every_cut(vllm_triton: EmbeddedTriton) -> None:
    lost = await run(vllm_triton, GREEDY)
    assert len(lost.ids) == 64
    await check_every_cut(vllm_triton, lost)


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.2},
        {"seed": 7},  # without effect at temperature 0
        {"stop_token_ids": [14]},  # "."
        {"stop_token_ids": [14], "include_stop_str_in_output": True},
        {"logit_bias": {END: 100}, "min_tokens": 12, "ignore_eos": False},
        {"logit_bias": {END: 100}, "skip_special_tokens": False, "max_tokens": 8},
    ],
    ids=str,
)
async def test_other_parameters_keep_their_effect(
    vllm_triton: EmbeddedTriton, sampling: dict[str, Any]
) -> None:
    lost = await run(vllm_triton, GREEDY | {"max_tokens": 24} | sampling)
    await check_every_cut(vllm_triton, lost)


@pytest.mark.parametrize("is_included", [True, False])
async def test_a_stop_string_across_the_cut_is_found(
    vllm_triton: EmbeddedTriton, is_included: bool
) -> None:
    whole = (await run(vllm_triton, GREEDY)).text
    stop = whole[40:60]
    ending = {"stop": [stop, "never seen"], "include_stop_str_in_output": is_included}
    lost = await run(vllm_triton, GREEDY | ending)
    assert lost.text == whole[: whole.index(stop) + is_included * len(stop)]
    assert lost.responses[-1]["finish_reason"] == ["stop"]
    await check_every_cut(vllm_triton, lost)
    # The engine is past the end before its tokens are looked at.
    await check_every_cut(
        vllm_triton, replace(lost, sampling=lost.sampling | {"stream_interval": 5})
    )
    # If the end is outside its budget, the held-back text comes with the last token.
    lost = await run(vllm_triton, GREEDY | ending | {"max_tokens": len(lost.ids) - 1})
    assert lost.responses[-1]["finish_reason"] == ["length"]
    await check_every_cut(vllm_triton, lost)


async def test_characters_cut_between_their_bytes(vllm_triton: EmbeddedTriton) -> None:
    """A sampled run, of which each token is generated again behind those before it."""
    sampling = {"max_tokens": 96, "temperature": 2.0, "seed": 3, "ignore_eos": True}
    lost = await run(vllm_triton, sampling | {"allowed_token_ids": BYTES, "logit_bias": BIAS})
    assert set(lost.text) & set("éüâ"), lost.text
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def check(tokens: int, response: dict[str, Any]) -> None:
        forced: dict[str, Any] = {"allowed_token_ids": response["token_ids"], "seed": None}
        async with limit:
            (again,) = await resume(
                vllm_triton, lost, tokens, **forced, logit_bias=None, max_tokens=tokens + 1
            )
        assert again["token_ids"] == response["token_ids"]
        assert again["text_output"] == response["text_output"]

    tokens = 0
    async with asyncio.TaskGroup() as checks:
        for response in lost.responses:
            if len(response["token_ids"]) == 1:  # sometimes the engine is faster than the stream
                checks.create_task(check(tokens, response))
            tokens += len(response["token_ids"])


async def test_a_long_answer_is_continued_near_its_end(vllm_triton: EmbeddedTriton) -> None:
    lost = await run(vllm_triton, GREEDY | {"max_tokens": 400})
    async with asyncio.TaskGroup() as checks:
        for tokens in (255, 256, 257, 399, 400):
            checks.create_task(check_cut(vllm_triton, lost, tokens, streams=True))


async def test_received_text_may_lack_its_nul(vllm_triton: EmbeddedTriton) -> None:
    lost = await run(vllm_triton, GREEDY | {"allowed_token_ids": [NUL], "max_tokens": 4})
    assert lost.text == "\0" * 4
    request = ask(
        "demo", PROMPT, lost.sampling, resume_token_ids=lost.ids[:3], resume_text="\ufffd" * 2
    )
    assert text(await collect(vllm_triton, request)) == "\0" * 2


@pytest.mark.parametrize(
    ("sampling", "tensors", "named"),
    [
        ({}, {"resume_token_ids": [4096]}, "vocabulary: from 0 to 4095"),
        ({}, {"resume_token_ids": [-1]}, "vocabulary"),
        ({}, {"resume_token_ids": [63] * 17}, "max_tokens=16"),
        ({}, {"resume_text": "another"}, "resume_text"),
        ({}, {"resume_text": "__"}, "resume_text"),
        ({}, {"resume_token_ids": []}, "resume_text"),
        ({"stop": "___"}, {}, "resume_text"),  # the client cannot have what was held back
        ({"stop": "__"}, {"resume_token_ids": [63] * 3}, "behind the end"),
        ({"ignore_eos": False}, {"resume_token_ids": [63, END, 63]}, "behind the end"),
        ({"stop_token_ids": [63]}, {"resume_token_ids": [63, 63]}, "behind the end"),
        ({"n": 2, "temperature": 1}, {}, "n"),
        ({"presence_penalty": 0.5}, {}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, {}, "frequency_penalty"),
        ({"bad_words": ["x"]}, {}, "bad_words"),
        ({"logprobs": 0}, {}, "logprobs"),
        ({"logprob_token_ids": [5]}, {}, "logprob_token_ids"),
        ({"prompt_logprobs": 0}, {}, "prompt_logprobs"),
        ({"structured_outputs": {"choice": ["_a", "_b"]}}, {}, "structured_outputs"),
        ({"thinking_token_budget": 5}, {}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}, {}, "repetition_\\w+"),
        ({"extra_args": {"a": 1}}, {}, "extra_args"),
        ({"trace_decode_token_ids": [1]}, {}, "trace_decode_token_ids"),
        ({"seed": 1, "temperature": 0.5}, {}, "seed"),
    ],
    ids=str,
)
async def test_what_cannot_be_continued_is_refused(
    vllm_triton: EmbeddedTriton, sampling: dict[str, Any], tensors: dict[str, Any], named: str
) -> None:
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True} | sampling
    tensors = {"resume_token_ids": [63], "resume_text": "_"} | tensors
    request = ask("demo", PROMPT, sampling, stream=True, **tensors)
    with pytest.raises(ModelError, match=rf"^INVALID_ARG: resume_token_ids .*\b{named}\b"):
        await collect(vllm_triton, request)


@pytest.mark.parametrize(
    ("sampling", "tensors", "message"),
    [
        ({}, {"resume_text": "_"}, "resume_token_ids is required"),
        ({"max_tokens": 1020}, {"resume_token_ids": [63]}, "max_tokens=1020"),
        (
            {},
            {"resume_token_ids": [63], "exclude_input_in_output": False},
            "exclude_input_in_output .* resume_token_ids",
        ),
        ({"n": 2}, {"return_token_ids": True}, "return_token_ids needs n=1"),
    ],
    ids=str,
)
async def test_wrong_use_of_the_tensors_is_refused(
    vllm_triton: EmbeddedTriton, sampling: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    request = ask("demo", PROMPT, sampling, **tensors)
    with pytest.raises(ModelError, match=rf"^INVALID_ARG: .*{message}"):
        await collect(vllm_triton, request)


async def test_a_continuation_can_be_cancelled(vllm_triton: EmbeddedTriton) -> None:
    lost = await run(vllm_triton, GREEDY | {"max_tokens": 4})
    request = ask(
        "demo",
        PROMPT,
        GREEDY | {"max_tokens": 1000},
        request_id="victim",
        stream=True,
        resume_token_ids=lost.ids,
        resume_text=lost.text,
        **RETURNS,
    )
    tokens = 0

    async def generate() -> None:
        nonlocal tokens
        async for response in stream(vllm_triton, request):
            if not tokens:
                assert await collect(vllm_triton, ask("demo", "", cancel_request_id="victim")) == []
            tokens += response["num_output_tokens"][0]

    with pytest.raises(ModelError, match=r"^CANCELLED: "):
        await asyncio.wait_for(generate(), 60)
    assert 0 < tokens < 996
