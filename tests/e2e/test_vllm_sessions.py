"""Engine sessions of our vLLM backend (docs/sessions.md), on the real engine."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from app.cli.up.triton import EmbeddedTriton
from tests.e2e.engine_metrics import read_metrics, settled_counts
from tests.e2e.session_client import Generation, SessionClient, connect, open_session
from tests.integration.support import until
from tests.triton_streams import ModelError, ask, call, collect, text

pytestmark = pytest.mark.timeout(300)

PROMPT = "import os\n\n\ndef "
GREEDY: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
RETURNS: dict[str, Any] = {
    "return_token_ids": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_logprobs": True,
}
# Output that is not live waits for longer than any test.
NEVER = {"flush_seconds": 3600}
# Tokens of the demo model, a byte each: together they make characters of one to three bytes.
BYTES = [128, 103, 121, 163, 96]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"logprobs": 2},
    {"stop": ["\n"]},
    {"stop": ["return", "("], "include_stop_str_in_output": True},
    {"stop_token_ids": [14]},
    {"ignore_eos": False, "logit_bias": {"0": 100}, "min_tokens": 5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"allowed_token_ids": BYTES, "temperature": 2.0, "seed": 3},
    {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False},
    {"structured_outputs": '{"regex": "[a-c]{9}"}', "ignore_eos": False},
    {"stream_interval": 7},
]


def submit(slot: int, sampling: dict[str, Any] | None = None, **members: Any) -> dict[str, Any]:
    generation = {"slot": slot, "prompt": PROMPT, "parameters": GREEDY | (sampling or {})}
    return {"submit": generation | {"token_ids": True} | members}


async def generate_alone(
    triton: EmbeddedTriton, sampling: dict[str, Any], prompt: str = PROMPT
) -> Generation:
    """The generation of a call of its own."""
    (whole,) = await collect(
        triton, ask("demo", prompt, GREEDY | sampling, exclude_input_in_output=True, **RETURNS)
    )
    return Generation(
        text=text([whole]),
        tokens=whole["num_output_tokens"][0],
        token_ids=whole["token_ids"],
        logprobs=json.loads(whole["logprobs"][0]) or [],
        prompt_tokens=whole["num_input_tokens"][0],
        finish_reason=whole["finish_reason"][0],
    )


def check_same(generation: Generation, expected: Generation) -> None:
    for name in ("text", "tokens", "token_ids", "prompt_tokens", "finish_reason", "error"):
        assert getattr(generation, name) == getattr(expected, name), name
    for position, other in zip(generation.logprobs, expected.logprobs, strict=True):
        assert list(position) == list(other)
        for token, entry in position.items():
            assert entry["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-3)


async def test_the_model_reports_its_sessions(vllm_triton: EmbeddedTriton) -> None:
    metadata = await call(vllm_triton, "ModelMetadata", pb.ModelMetadataRequest(name="demo"))
    assert {"session_v1", "session_commands"} <= {one.name for one in metadata.inputs}


@pytest.mark.parametrize("flush_seconds", [0, 0.02, 3600])
async def test_slots_have_the_output_of_calls_of_their_own(
    vllm_triton: EmbeddedTriton, flush_seconds: float
) -> None:
    prompts = [PROMPT, "class A:\n", "x = 'é€😀'\n"]
    cases = [(sampling, prompt) for sampling in SAMPLINGS for prompt in prompts]
    async with open_session(vllm_triton, {"flush_seconds": flush_seconds}) as session:
        for slot, (sampling, prompt) in enumerate(cases, start=1):
            await session.send(submit(slot, sampling, prompt=prompt, live=slot % 2 == 0))
        generations = await session.until_ended(*range(1, len(cases) + 1))
    alone = await asyncio.gather(
        *(generate_alone(vllm_triton, sampling, prompt) for sampling, prompt in cases)
    )
    for generation, expected in zip(generations, alone, strict=True):
        check_same(generation, expected)


async def test_token_ids_are_returned_on_request(vllm_triton: EmbeddedTriton) -> None:
    async with open_session(vllm_triton) as session:
        await session.send(*(submit(slot, token_ids=slot == 2) for slot in (1, 2, 3)))
        first, second, third = await session.until_ended(1, 2, 3)
    assert (first.token_ids, first.tokens) == ([], 48)
    assert first.text == second.text == third.text
    assert len(second.token_ids) == 48


async def test_only_live_slots_are_sent_in_every_step(vllm_triton: EmbeddedTriton) -> None:
    async with open_session(vllm_triton, NEVER) as session:
        await session.send(
            submit(1, {"max_tokens": 200}), submit(2, {"max_tokens": 200}, live=True)
        )
        lazy, live = await session.until_ended(1, 2)
    assert lazy.responses == 2  # its first output and its end
    assert live.responses > 2
    assert lazy.text == live.text


async def test_a_lazy_slot_is_sent_at_intervals(vllm_triton: EmbeddedTriton) -> None:
    async with open_session(vllm_triton, {"flush_seconds": 0.01}) as session:
        await session.send(submit(1, {"max_tokens": 900}))
        await session.until(lambda: session.slots[1].responses > 2)
        assert not session.slots[1].has_ended


async def test_slots_are_switched_while_they_run(vllm_triton: EmbeddedTriton) -> None:
    async with open_session(vllm_triton, NEVER) as session:
        await session.send(submit(1, {"max_tokens": 900}), {"live": [7]}, {"lazy": [8]})
        generation = session.slots[1]
        await session.until(lambda: generation.tokens)
        await session.send({"live": [1]})
        await session.until(lambda: generation.responses > 2)
        assert not generation.has_ended
        await session.send({"lazy": [1]}, submit(2, {"top_k": "x"}))
        await session.until_ended(2)
        responses = generation.responses
        await session.send({"cancel": [1]})
        await session.until_ended(1)
    assert generation.responses == responses + 1
    whole = await generate_alone(vllm_triton, {"max_tokens": generation.tokens})
    assert generation.token_ids == whole.token_ids


async def test_a_cancelled_slot_has_its_output_until_then(vllm_triton: EmbeddedTriton) -> None:
    async with open_session(vllm_triton, NEVER) as session:
        await session.send(submit(1, {"max_tokens": 900}), submit(2, {"max_tokens": 200}))
        await session.send(submit(3), {"cancel": [3]})  # before it is in the engine
        await session.until(lambda: session.slots[1].tokens)
        await session.send({"cancel": [1, 1, 99]})
        cancelled, other, early = await session.until_ended(1, 2, 3)
        await session.send({"cancel": [1, 2, 3]}, {"live": [2]})
    assert cancelled.error == early.error == "CANCELLED: the generation was cancelled"
    assert (early.text, early.tokens) == ("", 0)
    assert 0 < cancelled.tokens < 900
    assert len(cancelled.token_ids) == cancelled.tokens
    whole = await generate_alone(vllm_triton, {"max_tokens": cancelled.tokens})
    assert (cancelled.text, cancelled.token_ids) == (whole.text, whole.token_ids)
    check_same(other, await generate_alone(vllm_triton, {"max_tokens": 200}))


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 2},
        {"tempreature": 1},
        {"max_tokens": 100_000},
        {"lora_name": "none"},
        {"logit_bias": {"9999999": 1}},
        {"structured_outputs": '{"regex": "("}'},
    ],
    ids=str,
)
async def test_a_refusal_is_that_of_a_call_and_of_its_slot_alone(
    vllm_triton: EmbeddedTriton, sampling: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=r"^INVALID_ARG: ") as refused:
        await generate_alone(vllm_triton, sampling)
    async with open_session(vllm_triton) as session:
        await session.send(submit(1), submit(2, sampling), submit(3))
        *good, bad = await session.until_ended(1, 3, 2)
    assert bad.error == str(refused.value)
    assert (bad.text, bad.tokens) == ("", 0)
    assert [generation.finish_reason for generation in good] == ["length", "length"]


async def test_refusals_of_sessions_only(vllm_triton: EmbeddedTriton) -> None:
    async with open_session(vllm_triton) as session:
        await session.send(submit(1, {"n": 2, "temperature": 1}), submit(2, prompt="\ud800"))
        several, surrogate = await session.until_ended(1, 2)
    assert several.error == "INVALID_ARG: n must be 1 in a session, got n=2"
    assert surrogate.error is not None
    assert surrogate.error.startswith("INVALID_ARG: prompt is not UTF-8: ")


async def test_a_slot_continues_a_lost_generation(vllm_triton: EmbeddedTriton) -> None:
    whole = await generate_alone(vllm_triton, {"max_tokens": 200})
    cuts = [0, 1, 100, 199, 200]
    async with open_session(vllm_triton) as session:
        for slot, cut in enumerate(cuts, start=1):
            # The client may lack text of its last tokens.
            resume = {"token_ids": whole.token_ids[:cut], "text": whole.text[: cut // 2]}
            await session.send(submit(slot, {"max_tokens": 200}, resume=resume))
        wrong = {"token_ids": whole.token_ids[:5], "text": "another"}
        await session.send(submit(6, resume=wrong), submit(7, {"logprobs": 1}, resume=wrong))
        await session.send(submit(8, {"max_tokens": 900}, resume={"token_ids": [63], "text": "_"}))
        await session.until(lambda: session.slots[8].tokens)
        await session.send({"cancel": [8]})
        *continued, text_refused, logprobs_refused, cancelled = await session.until_ended(
            *range(1, 9)
        )
    for cut, generation in zip(cuts, continued, strict=True):
        assert whole.text[: cut // 2] + generation.text == whole.text
        assert generation.token_ids == whole.token_ids[cut:]
        assert generation.tokens == 200 - cut
        assert generation.prompt_tokens == whole.prompt_tokens
        assert generation.finish_reason == "length"
    for refused in (text_refused, logprobs_refused):
        assert refused.error is not None
        assert refused.error.startswith("INVALID_ARG: resume_token_ids ")
    assert cancelled.error == "CANCELLED: the generation was cancelled"
    assert 0 < cancelled.tokens < 899


async def test_a_message_that_is_refused_does_nothing(vllm_triton: EmbeddedTriton) -> None:
    async with open_session(vllm_triton) as session:
        await session.send(submit(1))
        for commands, message in (
            ([submit(2), b"{"], "session_commands: command 2: not JSON"),
            ([submit(2), {"stop": [1]}], "session_commands: command 2: unknown command 'stop'"),
            ([submit(2), submit(1)], "slot 1 does not follow slot 2"),
            ([submit(2), submit(2)], "slot 2 does not follow slot 2"),
            ([submit(1)], "slot 1 does not follow slot 1"),
            ([submit(2), {"open": NEVER}], "already open"),
            ([{"open": NEVER}], "already open"),
        ):
            error = await session.until_refused(await session.send(*commands))
            assert error.startswith("INVALID_ARG: ")
            assert message in error
        for name, message in (
            ("other", "session 'other': not open"),
            ("", "session_v1 must have 1 to 64 characters"),
            ("x" * 65, "session_v1 must have 1 to 64 characters"),
        ):
            error = await session.until_refused(await session.send(submit(2), name=name))
            assert error == f"INVALID_ARG: {message}"
        await session.send(submit(2))  # its number is still free
        for generation in await session.until_ended(1, 2):
            assert generation.finish_reason == "length"


async def test_a_session_that_cannot_be_opened(vllm_triton: EmbeddedTriton) -> None:
    async with connect(vllm_triton) as session:
        for commands in ([], [submit(1)], [{"open": NEVER}, submit(1), submit(1)]):
            error = await session.until_refused(await session.send(*commands))
            assert error.startswith("INVALID_ARG: session ")
        await session.send({"open": NEVER}, submit(1))
        (generation,) = await session.until_ended(1)
        assert generation.finish_reason == "length"
        await session.close()


async def running(triton: EmbeddedTriton) -> int:
    metrics = await read_metrics(triton)
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]


def has_output(session: SessionClient, slot: int) -> bool:
    return session.slots[slot].tokens > 0


async def is_idle(triton: EmbeddedTriton) -> bool:
    return await running(triton) == 0


async def test_close_ends_the_generations(vllm_triton: EmbeddedTriton) -> None:
    async with connect(vllm_triton) as session:
        for slots in (range(1, 11), range(11, 21)):  # the same id again
            await session.send({"open": NEVER})
            await session.send(*(submit(slot, {"max_tokens": 900}) for slot in slots))
            await session.until(partial(has_output, session, slots[0]))
            await session.send({"close": True})
        await session.close()
        assert list(session.errors.values()) == [f"INVALID_ARG: session {session.name!r}: not open"]
        assert not any(generation.has_ended for generation in session.slots.values())
    await until(lambda: is_idle(vllm_triton))


async def test_a_broken_call_frees_the_engine(vllm_triton: EmbeddedTriton) -> None:
    async with connect(vllm_triton) as session:
        await session.send({"open": NEVER})
        await session.send(*(submit(slot, {"max_tokens": 900}) for slot in range(1, 41)))
        await session.until(lambda: session.slots[1].tokens)
        await until(lambda: running(vllm_triton))
        session.call.cancel()
    await until(lambda: is_idle(vllm_triton))
    async with connect(vllm_triton) as again:
        again.name = session.name
        await again.send({"open": NEVER}, submit(1))
        (generation,) = await again.until_ended(1)
        await again.close()
    assert generation.finish_reason == "length"


async def test_unacknowledged_responses_are_one_a_second(vllm_triton: EmbeddedTriton) -> None:
    """Takes a second: the last response is beyond the window."""
    clock = asyncio.get_running_loop().time
    async with open_session(vllm_triton, NEVER | {"window": 2}) as session:
        began = clock()
        await session.send(submit(1, {"max_tokens": 100}, live=True))
        (generation,) = await session.until_ended(1)
        assert 1 < generation.responses <= 4 + clock() - began
        await session.send(submit(2, {"max_tokens": 900}, live=True), {"ack": 1000})
        await session.until(lambda: session.slots[2].responses > 10)
    check_same(generation, await generate_alone(vllm_triton, {"max_tokens": 100}))


async def test_counters_of_tokens_include_those_of_sessions(vllm_triton: EmbeddedTriton) -> None:
    before = await settled_counts(vllm_triton)
    async with open_session(vllm_triton) as session:
        await session.send(submit(1), submit(2))
        first, second = await session.until_ended(1, 2)
    assert first.prompt_tokens is not None
    after = (before[0] + 2 * first.prompt_tokens, before[1] + first.tokens + second.tokens)
    assert await settled_counts(vllm_triton, other_than=before) == after
