"""Our vLLM backend against the tensor contract of NVIDIA's, on the real engine."""

import asyncio
import json
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from app.cli.up.triton import EmbeddedTriton
from tests.e2e.engine_metrics import settled_counts
from tests.triton_streams import (
    RETURNS,
    ModelError,
    ask,
    check_cancellations,
    collect,
    stream,
    text,
)

pytestmark = pytest.mark.timeout(300)

PROMPT = "import os\n\n\ndef "
EVERYTHING = dict.fromkeys(RETURNS, True)


def generating(triton: EmbeddedTriton, sampling: dict[str, Any], **tensors: Any) -> Any:
    return collect(triton, ask("demo", PROMPT, sampling, **tensors))


async def test_the_outputs_of_a_stream_are_those_of_the_whole_answer(
    vllm_triton: EmbeddedTriton,
) -> None:
    sampling = {"max_tokens": 12, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    streamed = await generating(vllm_triton, sampling, stream=True, **EVERYTHING)
    (whole,) = await generating(vllm_triton, sampling, **EVERYTHING)
    assert len(streamed) > 1
    # NVIDIA's default: a stream never echoes the prompt, a whole answer does.
    assert whole["text_output"] == [PROMPT + text(streamed)]
    (bare,) = await generating(vllm_triton, sampling, exclude_input_in_output=True)
    assert bare == {"text_output": [text(streamed)]}
    for response in (*streamed, whole):
        assert response["num_input_tokens"] == whole["num_input_tokens"]
    assert sum(response["num_output_tokens"][0] for response in streamed) == 12
    assert whole["num_output_tokens"] == [12]
    assert [response["finish_reason"][0] for response in streamed[:-1]].count("None") == (
        len(streamed) - 1
    )
    assert streamed[-1]["finish_reason"] == whole["finish_reason"] == ["length"]
    positions = [p for response in streamed for p in json.loads(response["logprobs"][0])]
    assert len(positions) == 12
    for position in positions:
        assert all(int(token) >= 0 for token in position)
        assert all(entry["logprob"] <= 0 for entry in position.values())
    best = sum(max(entry["logprob"] for entry in p.values()) for p in positions)
    assert streamed[-1]["cumulative_logprob"][0] == pytest.approx(best, rel=1e-3)


async def test_several_outputs_keep_their_places(vllm_triton: EmbeddedTriton) -> None:
    sampling = {"max_tokens": 8, "n": 3, "seed": 7, "ignore_eos": True}
    streamed = await generating(vllm_triton, sampling, stream=True, **EVERYTHING)
    assert all(len(response["text_output"]) == 3 for response in streamed)
    for index in range(3):
        assert sum(response["num_output_tokens"][index] for response in streamed) == 8
    assert streamed[-1]["finish_reason"] == ["length"] * 3
    (whole,) = await generating(vllm_triton, sampling, exclude_input_in_output=True)
    assert len(whole["text_output"]) == 3


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_p": 2}, "top_p"),
        ({"top_p": "abc"}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, r"max_tokens=100000 .* length of 1024 tokens"),
        ({"min_p": 3}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n must be"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"tempreature": 1}, "tempreature"),
        ({"output_kind": 1}, "output_kind"),
        ({"lora_name": "none"}, "lora_name"),
        ({"structured_outputs": "{"}, "structured_outputs"),
        ({"structured_outputs": '{"regex": "("}'}, "regex"),
    ],
)
async def test_a_wrong_parameter_is_refused_by_name(
    vllm_triton: EmbeddedTriton, sampling: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=rf"^INVALID_ARG: .*{named}"):
        await generating(vllm_triton, sampling, stream=True)


async def test_refusals_leave_the_others_alone(vllm_triton: EmbeddedTriton) -> None:
    sampling = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
    good = [generating(vllm_triton, sampling, stream=True) for _ in range(8)]
    bad = [generating(vllm_triton, {"top_k": "x"}, stream=True) for _ in range(50)]
    answers, refusals = await asyncio.gather(
        asyncio.gather(*good), asyncio.gather(*bad, return_exceptions=True)
    )
    assert all(text(answer) for answer in answers)
    assert all(isinstance(refusal, ModelError) for refusal in refusals)


async def test_old_clients_and_structured_outputs(vllm_triton: EmbeddedTriton) -> None:
    strings = {"max_tokens": "5", "temperature": "0.0", "top_k": "-1", "ignore_eos": "true"}
    (answer,) = await generating(vllm_triton, strings, return_num_output_tokens=True)
    assert answer["num_output_tokens"] == [5]
    choice = {"max_tokens": 8, "structured_outputs": json.dumps({"choice": ["yes", "no"]})}
    (answer,) = await generating(vllm_triton, choice, exclude_input_in_output=True)
    assert answer["text_output"][0] in ("yes", "no")


async def test_a_request_cancels_another_of_the_vllm_backend(vllm_triton: EmbeddedTriton) -> None:
    sampling = {"max_tokens": 900, "ignore_eos": True}
    request = ask(
        "demo", PROMPT, sampling, request_id="victim", stream=True, return_num_output_tokens=True
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
    assert 0 < tokens < 900


async def test_a_cancellation_may_overtake_its_request(vllm_triton: EmbeddedTriton) -> None:
    sampling = {"max_tokens": 900, "ignore_eos": True}

    def ask_long(request_id: str) -> pb.ModelInferRequest:
        return ask("demo", PROMPT, sampling, request_id=request_id)

    await check_cancellations(vllm_triton, "demo", ask_long)


async def test_counters_of_tokens_rise_by_those_of_each_request(
    vllm_triton: EmbeddedTriton,
) -> None:
    sampling = {"max_tokens": 12, "ignore_eos": True}
    await generating(vllm_triton, sampling)
    before = await settled_counts(vllm_triton)
    assert before[1] >= 12
    (answer,) = await generating(vllm_triton, sampling, return_num_input_tokens=True)
    after = (before[0] + answer["num_input_tokens"][0], before[1] + 12)
    assert await settled_counts(vllm_triton, other_than=before) == after
