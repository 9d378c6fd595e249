"""Engine sessions of the scripted model (docs/sessions.md), by a client of this page alone."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from app.cli.up.triton import EmbeddedTriton
from tests.e2e.session_client import Generation, open_session
from tests.triton_streams import RETURNS, ModelError, ask, call, stream

MODEL = "scripted"
# Output that is not live waits for longer than any test.
NEVER = {"flush_seconds": 3600}
ENDLESS = "endless {{chunks=100000 delay_ms=5}}"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("a", {}),
    ("{{chunks=40}} é🙂", {"seed": 7}),
    ("{{chunks=40 delay_ms=1 first_delay_ms=5}}", {"logprobs": 2}),
    ("{{chunks=9}}", {"max_tokens": 4, "logprobs": 0}),
    ("{{chunks=9 nul}}", {"logprobs": 1}),
    ("{{text=漢字 und Ω 🙂 naïve}}", {}),
    ("{{text=one two three}}", {"stop": ["three", "o t"]}),
    ("{{text=one two three}}", {"stop": "two", "include_stop_str_in_output": True}),
    ("{{chunks=3}}", {"ignore_eos": True, "max_tokens": 70}),
    ("{{chunks=0}}", {"logprobs": 1}),
]
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("{{fail_at=0}}", {}),
    ("{{fail_at=5}}", {"logprobs": 1}),
    ("{{lost_at=16}}", {}),
    ("{{chunks=9 fail_at=3 delay_ms=1}}", {}),
    ("{{refuse}}", {}),
    ("{{chunks=many}}", {}),
    ("x", {"max_tokens": 0}),
    ("x", {"stop": 5}),
    ("x", {"n": 2}),
]


def submit(
    slot: int, prompt: str = "x {{chunks=20}}", parameters: Any = None, **members: Any
) -> dict[str, Any]:
    generation = {"slot": slot, "prompt": prompt, "parameters": parameters or {}}
    return {"submit": generation | {"token_ids": True} | members}


async def generate_alone(
    triton: EmbeddedTriton, prompt: str, sampling: dict[str, Any], **tensors: Any
) -> Generation:
    """The generation of a call of its own."""
    flags: dict[str, Any] = dict.fromkeys((*RETURNS, "return_token_ids", "stream"), True)
    whole = Generation()
    try:
        async for response in stream(triton, ask(MODEL, prompt, sampling, **flags, **tensors)):
            whole.text += response["text_output"][0]
            whole.tokens += response["num_output_tokens"][0]
            whole.token_ids += response.get("token_ids", [])
            whole.logprobs += json.loads(response["logprobs"][0]) or []
            whole.prompt_tokens = response["num_input_tokens"][0]
            reason = response["finish_reason"][0]
            whole.finish_reason = None if reason == "None" else reason
    except ModelError as error:
        whole.error = str(error)
    return whole


def content(generation: Generation) -> Generation:
    """A generation, less the number of its responses."""
    return replace(generation, responses=0)


async def test_the_scripted_model_has_sessions(triton: EmbeddedTriton) -> None:
    metadata = await call(triton, "ModelMetadata", pb.ModelMetadataRequest(name=MODEL))
    assert {"session_v1", "session_commands"} <= {one.name for one in metadata.inputs}


@pytest.mark.parametrize("flush_seconds", [0.01, 3600])
async def test_a_slot_has_the_output_of_a_call_of_its_own(
    triton: EmbeddedTriton, flush_seconds: float
) -> None:
    async with open_session(triton, {"flush_seconds": flush_seconds}, MODEL) as session:
        for slot, case in enumerate(CASES * 2, start=1):
            await session.send(submit(slot, *case, live=slot <= len(CASES)))
        found = await session.until_ended(*range(1, 2 * len(CASES) + 1))
    alone = [await generate_alone(triton, *case) for case in CASES]
    assert [content(generation) for generation in found] == alone * 2


@pytest.mark.parametrize("is_live", [False, True])
async def test_a_failing_slot_has_the_error_of_a_call_of_its_own(
    triton: EmbeddedTriton, is_live: bool
) -> None:
    async with open_session(triton, NEVER, MODEL) as session:
        await session.send(*(submit(n, *case, live=is_live) for n, case in enumerate(FAULTS, 1)))
        await session.send(submit(len(FAULTS) + 1))
        *found, good = await session.until_ended(*range(1, len(FAULTS) + 2))
    for case, generation in zip(FAULTS, found, strict=True):
        expected = await generate_alone(triton, *case)
        assert expected.error is not None
        # A call without output reports no length of its prompt.
        expected.prompt_tokens = generation.prompt_tokens
        assert content(generation) == expected
    assert good.finish_reason == "stop"


async def test_a_slot_goes_on_behind_an_earlier_generation(triton: EmbeddedTriton) -> None:
    prompt = "{{chunks=50 nul once lost_at=40}} é"
    lost = await generate_alone(triton, prompt, {})
    assert (lost.tokens, lost.error) == (
        40,
        "UNAVAILABLE: the script lost its engine after 40 chunks",
    )
    words = lost.text.replace("\0", "\ufffd").split(" ")
    cuts = (1, 20, 40)
    async with open_session(triton, NEVER, MODEL) as session:
        for slot, cut in enumerate(cuts, start=1):
            resume = {"token_ids": lost.token_ids[:cut], "text": " ".join(words[:cut])}
            await session.send(submit(slot, prompt, resume=resume))
        for slot, (ids, text) in enumerate((([7], "x"), (lost.token_ids[:1], "x")), start=4):
            await session.send(submit(slot, prompt, resume={"token_ids": ids, "text": text}))
        *continued, other_ids, other_text = await session.until_ended(1, 2, 3, 4, 5)
    for cut, generation in zip(cuts, continued, strict=True):
        earlier = {"resume_token_ids": lost.token_ids[:cut], "resume_text": " ".join(words[:cut])}
        assert content(generation) == await generate_alone(triton, prompt, {}, **earlier)
        assert generation.tokens == 50 - cut
        assert generation.finish_reason == "stop"
    assert other_ids.error == "INVALID_ARG: resume_token_ids are not the ids of this script"
    assert other_text.error == "INVALID_ARG: resume_token_ids do not fit resume_text"


async def test_token_ids_are_those_of_the_slots_that_request_them(triton: EmbeddedTriton) -> None:
    async with open_session(triton, NEVER, MODEL) as session:
        await session.send(*(submit(slot, token_ids=slot == 2) for slot in (1, 2, 3)))
        first, second, third = await session.until_ended(1, 2, 3)
    assert first.text == second.text == third.text
    assert [len(one.token_ids) for one in (first, second, third)] == [0, 20, 0]


# --- times ------------------------------------------------------------------------------------------


async def test_the_first_output_and_the_end_of_a_lazy_slot_are_sent_at_once(
    triton: EmbeddedTriton,
) -> None:
    prompt = "{{chunks=100 delay_ms=1}}"
    async with open_session(triton, NEVER, MODEL) as session:
        await session.send(submit(1, prompt), submit(2, prompt, live=True))
        lazy, live = await session.until_ended(1, 2)
    assert lazy.responses == 2
    assert live.responses > 2
    assert content(lazy) == content(live)


async def test_output_of_a_lazy_slot_is_sent_at_intervals(triton: EmbeddedTriton) -> None:
    async with open_session(triton, {"flush_seconds": 0.01}, MODEL) as session:
        await session.send(submit(1, ENDLESS))
        await session.until(lambda: session.slots[1].responses > 4)
        assert not session.slots[1].has_ended


async def test_slots_become_live_and_lazy_while_they_run(triton: EmbeddedTriton) -> None:
    async with open_session(triton, NEVER, MODEL) as session:
        await session.send(submit(1, ENDLESS), {"live": [7]}, {"lazy": [8]})
        one = session.slots[1]
        await session.until(lambda: one.tokens)
        await session.send({"live": [1]})
        await session.until(lambda: one.responses > 3)
        await session.send({"lazy": [1]}, submit(2, "{{refuse}}"))
        await session.until_ended(2)
        responses, tokens = one.responses, one.tokens
        await session.send(submit(3, "{{chunks=20 delay_ms=5}}", live=True))
        await session.until_ended(3)
        assert one.responses == responses
        await session.send({"cancel": [1]})
        await session.until_ended(1)
    assert one.responses == responses + 1
    assert one.tokens > tokens
    whole = await generate_alone(triton, ENDLESS, {"max_tokens": one.tokens})
    assert one.text == whole.text


async def test_a_cancelled_slot_has_all_output_until_then(triton: EmbeddedTriton) -> None:
    async with open_session(triton, NEVER, MODEL) as session:
        await session.send(submit(1, "x {{chunks=1000 delay_ms=5}}"), submit(2))
        await session.send(submit(3, "{{delay_ms=60000}}"), {"cancel": [3]})
        await session.send(submit(4, "{{chunks=20 delay_ms=5}}"))
        await session.until_ended(2, 4)
        assert session.slots[1].responses == 1
        await session.send({"cancel": [1, 1, 2, 99]})
        cancelled, other, early = await session.until_ended(1, 2, 3)
        await session.send({"cancel": [1, 2, 3]}, {"live": [1]})
    assert cancelled.error == early.error == "CANCELLED: the request was cancelled"
    assert (early.text, early.tokens, other.finish_reason) == ("", 0, "stop")
    assert 1 < cancelled.tokens < 1000
    assert cancelled.responses == 2
    assert session.errors == {}
    part = {"max_tokens": cancelled.tokens}
    whole = await generate_alone(triton, "x {{chunks=1000 delay_ms=5}}", part)
    assert (cancelled.text, cancelled.token_ids) == (whole.text, whole.token_ids)


@pytest.mark.trial
async def test_a_model_joins_its_steps_while_nothing_is_acknowledged(
    triton: EmbeddedTriton,
) -> None:
    """Beyond the window, one response a second: two of them are waited for."""
    began = time.monotonic()
    async with open_session(triton, NEVER | {"window": 2}, MODEL) as session:
        one = session.slots[1]
        await session.send(submit(1, ENDLESS, live=True))
        await session.until(lambda: session.responses == 4)
        # An error of a message is no response of the session, and passes the window.
        await session.until_refused(await session.send({"no": 1}))
        assert session.responses <= 3 + (time.monotonic() - began)
        assert not one.has_ended
        await session.send({"ack": 1_000_000})
        await session.until(lambda: session.responses > 50)
        await session.send({"cancel": [1]})
        await session.until_ended(1)
    assert len(one.text.split(" ")) == len(one.token_ids) == one.tokens
