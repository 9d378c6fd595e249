"""The scripted model keeps what other tests build on: its text, its faults, its cancellation."""

import asyncio
import contextlib
import importlib.util
import json
import time
from types import ModuleType
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import (
    GenerationError,
    ModelFailedError,
    RefusedError,
    StreamLostError,
)
from tests.conftest import ROOT
from tests.integration.support import until
from tests.triton_streams import (
    RETURNS,
    ModelError,
    ask,
    check_cancellations,
    collect,
    stream,
    text,
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The pure half of the model."""
    path = ROOT / "triton" / "models" / "scripted" / "1" / "script.py"
    spec = importlib.util.spec_from_file_location("scripted_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_text_is_a_function_of_the_request(
    triton: EmbeddedTriton, script: ModuleType
) -> None:
    texts = set()
    for prompt in ("a", "b", "漢字 \N{GRINNING FACE}"):
        for seed in (1, 2):
            sampling = {"max_tokens": 20, "seed": seed}
            expected = "".join(script.write_script(prompt, sampling).chunks)
            for _ in range(2):
                responses = await collect(triton, ask("scripted", prompt, sampling, stream=True))
                assert len(responses) == 20
                assert text(responses) == expected
            texts.add(expected)
    assert len(texts) == 6
    assert any(not word.isascii() for word in texts)


async def test_a_shorter_script_begins_a_longer_one(script: ModuleType) -> None:
    chunks = {n: script.write_script("x", {"max_tokens": n}).chunks for n in (5, 500)}
    assert chunks[5] == chunks[500][:5]


@pytest.mark.parametrize(
    ("prompt", "sampling", "expected", "reason"),
    [
        ("{{text=one two three}}", {}, "one two three", "stop"),
        ("{{text=one two three}}", {"max_tokens": 2}, "one two", "length"),
        ("{{text=one two three}}", {"max_tokens": "3"}, "one two three", "stop"),
        ("{{text=one two three}}", {"stop": "tw"}, "one ", "stop"),
        ("{{text=one two three}}", {"stop": ["three", "o t"]}, "one tw", "stop"),
        (
            "{{text=one two three}}",
            {"stop": "two", "include_stop_str_in_output": True},
            "one two",
            "stop",
        ),
        ("{{chunks=0}}", {}, "", "stop"),
    ],
)
async def test_ends_like_a_model(
    triton: EmbeddedTriton, prompt: str, sampling: dict[str, Any], expected: str, reason: str
) -> None:
    flags: dict[str, Any] = dict.fromkeys(RETURNS, True)
    request = ask("scripted", prompt, sampling, stream=True, **flags)
    responses = await collect(triton, request)
    assert text(responses) == expected
    assert responses[-1]["finish_reason"] == [reason]
    assert {response["finish_reason"][0] for response in responses[:-1]} <= {"None"}


async def test_tokens_of_an_id_complete_no_character(
    triton: EmbeddedTriton, script: ModuleType
) -> None:
    prompt, sampling = "x {{token=173 chunks=9}}", {"max_tokens": 3, "logprobs": 1}
    responses = await collect(triton, ask("scripted", prompt, sampling, stream=True))
    assert text(responses) == "\ufffd" * 3
    assert [script.to_token_id(one) for one in script.write_script(prompt, sampling).chunks] == [
        173
    ] * 3
    assert 173 in script.write_logprobs(script.write_script(prompt, sampling).chunks[0], 1)


async def test_counts_and_whole_answers(triton: EmbeddedTriton) -> None:
    flags: dict[str, Any] = dict.fromkeys(RETURNS, True)
    sampling = {"max_tokens": 3, "logprobs": 1}
    streamed = await collect(triton, ask("scripted", "two words", sampling, stream=True, **flags))
    assert [response["num_output_tokens"] for response in streamed] == [[1]] * 3
    assert all(response["num_input_tokens"] == [2] for response in streamed)
    (whole,) = await collect(triton, ask("scripted", "two words", sampling, stream=False, **flags))
    # NVIDIA's default: a whole answer begins with the prompt.
    assert whole["text_output"] == ["two words" + text(streamed)]
    assert whole["num_output_tokens"] == [3]
    # The chosen token is the first of its place, as in vLLM.
    places = [place for response in streamed for place in json.loads(response["logprobs"][0])]
    assert json.loads(whole["logprobs"][0]) == places
    total = sum(next(iter(place.values()))["logprob"] for place in places)
    assert (
        streamed[-1]["cumulative_logprob"] == whole["cumulative_logprob"] == [pytest.approx(total)]
    )


@pytest.mark.parametrize(
    ("prompt", "parameters", "kind", "chunks"),
    [
        ("{{refuse}}", {}, RefusedError, 0),
        ("{{chunk=3}}", {}, RefusedError, 0),
        ("{{chunks=many}}", {}, RefusedError, 0),
        ("x", {"max_tokens": 0}, RefusedError, 0),
        ("x", {"n": 2}, RefusedError, 0),
        ("{{fail_at=0}}", {}, ModelFailedError, 0),
        ("{{fail_at=3}}", {}, ModelFailedError, 3),
        ("{{lost_at=3}}", {}, StreamLostError, 3),
        # A fault beyond the script's end never comes; at its end it does.
        ("{{chunks=2 fail_at=2}}", {}, ModelFailedError, 2),
    ],
)
async def test_faults(
    triton: EmbeddedTriton,
    prompt: str,
    parameters: dict[str, Any],
    kind: type[GenerationError],
    chunks: int,
) -> None:
    deltas = []

    async def generate() -> None:
        async with triton.client() as client:
            async for delta in client.generate("scripted", prompt, parameters):
                deltas.append(delta)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(kind):
        await generate()
    assert len(deltas) == chunks


async def test_hundreds_wait_at_the_same_time(triton: EmbeddedTriton, script: ModuleType) -> None:
    async def generate(client: TritonClient, number: int) -> None:
        prompt = f"{number} {{{{delay_ms=100 chunks=10}}}}"
        expected = "".join(script.write_script(prompt, {}).chunks)
        deltas = [delta.text async for delta in client.generate("scripted", prompt, {})]
        assert "".join(deltas) == expected

    async with triton.client() as client:
        # One after the other these are 200 seconds.
        async with asyncio.timeout(60):
            await asyncio.gather(*(generate(client, number) for number in range(200)))


async def test_a_request_cancels_another_of_the_scripted_model(triton: EmbeddedTriton) -> None:
    request = ask(
        "scripted", "{{delay_ms=50}}", {"max_tokens": 1000}, request_id="victim", stream=True
    )
    responses = []

    async def generate() -> None:
        async for response in stream(triton, request):
            responses.append(response)
            if len(responses) == 3:
                assert await collect(triton, ask("scripted", "", cancel_request_id="victim")) == []

    with pytest.raises(ModelError, match=r"^CANCELLED: "):
        await asyncio.wait_for(generate(), 60)
    assert 3 <= len(responses) < 100
    # Cancelling an ended or unknown request returns no error either.
    assert await collect(triton, ask("scripted", "", cancel_request_id="victim")) == []


async def test_a_cancellation_may_overtake_its_request(triton: EmbeddedTriton) -> None:
    def ask_long(request_id: str) -> pb.ModelInferRequest:
        return ask("scripted", "{{delay_ms=60000}}", request_id=request_id)

    await check_cancellations(triton, "scripted", ask_long)


@pytest.mark.trial
async def test_stopped_generations_leave_nothing_behind(triton: EmbeddedTriton) -> None:
    """Stopped in the middle of a wait, too, the call is ended by the model and not cancelled.

    A call that is cancelled while Triton answers it blocks its model indefinitely.
    """

    async def generate(client: TritonClient, number: int) -> None:
        async for _ in client.generate("scripted", f"{number} {{{{chunks=4 delay_ms=20}}}}", {}):
            pass

    async with triton.client() as client:
        for _ in range(10):
            running = [asyncio.create_task(generate(client, number)) for number in range(50)]
            for task in running:
                await asyncio.sleep(0.003)  # each is stopped at another moment of its waits
                task.cancel()
            await asyncio.wait(running)
        while client._abandoned:
            await asyncio.wait(client._abandoned)
        await client.unload("scripted")

        async def is_unloaded() -> bool:
            return any(entry.reason == "unloaded" for entry in await client.index())

        try:
            await until(is_unloaded, 60)
        finally:
            await client.load("scripted")


@pytest.mark.trial
async def test_no_process_outlives_a_killed_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("mortal")
    models = {"scripted": ROOT / "triton" / "models" / "scripted"}
    venv = ROOT / ".venv-triton"
    server = EmbeddedTriton(venv, directory / "work", models, directory / "triton.log")
    await server.start()
    try:
        (process,) = [
            child
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE  # of a server that another test has killed
            and str(directory) in " ".join(child.cmdline())
        ]
        family = process.children(recursive=True)
        assert family
        waiting = asyncio.create_task(
            collect(server, ask("scripted", "{{delay_ms=60000}}", stream=True))
        )
        async with server.client() as client:
            async for _ in client.generate("scripted", "taken", {"max_tokens": 1}):
                pass
        process.kill()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await waiting
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
        assert alive == []
    finally:
        await server.stop()


async def test_a_clock_shows_the_time_of_each_chunk(triton: EmbeddedTriton) -> None:
    began = time.monotonic_ns()
    prompt = "{{clock chunks=5 delay_ms=10}}"
    responses = await collect(triton, ask("scripted", prompt, {}, stream=True))
    sent = [int(word) for word in text(responses).split()]
    assert len(sent) == len(responses) == 5
    assert sorted(sent) == sent
    assert began < sent[0]
    assert sent[-1] < time.monotonic_ns()


def to_ids(responses: list[dict[str, Any]]) -> list[int]:
    return [number for response in responses for number in response.get("token_ids", [])]


@pytest.mark.parametrize("fault", ["", "once lost_at=40"])
async def test_a_generation_goes_on_behind_an_earlier_one(
    triton: EmbeddedTriton, fault: str
) -> None:
    prompt = f"{{{{{fault} chunks=50}}}} é"
    flags: dict[str, Any] = dict.fromkeys((*RETURNS, "return_token_ids"), True)
    whole = await collect(triton, ask("scripted", "{{chunks=50}} é", {}, stream=True, **flags))
    assert [len(response["token_ids"]) for response in whole] == [1] * 50
    whole = []
    with contextlib.suppress(ModelError):
        async for response in stream(triton, ask("scripted", prompt, {}, stream=True, **flags)):
            whole.append(response)
    ids = to_ids(whole)
    assert len(ids) == (40 if fault else 50)
    for count in (1, 20, 40, len(ids)):
        earlier: dict[str, Any] = {
            "resume_token_ids": ids[:count],
            "resume_text": text(whole[:count]),
        }
        rest = await collect(triton, ask("scripted", prompt, {}, stream=True, **flags, **earlier))
        assert to_ids(rest)[: len(ids) - count] == ids[count:]
        assert text(rest).startswith(text(whole[count:]))
        assert sum(response["num_output_tokens"][0] for response in rest) == 50 - count
        assert rest[-1]["finish_reason"] == ["stop"]
        assert rest[0]["num_input_tokens"] == whole[0]["num_input_tokens"]


@pytest.mark.parametrize(
    ("ids", "earlier"), [([1, 2], None), (None, "another text"), ([], None), ([7] * 100, None)]
)
async def test_what_is_not_its_own_is_not_gone_on_with(
    triton: EmbeddedTriton, ids: list[int] | None, earlier: str | None
) -> None:
    flags: dict[str, Any] = {"stream": True, "return_token_ids": True}
    own = await collect(triton, ask("scripted", "{{chunks=5}}", {}, **flags))
    resume: dict[str, Any] = {
        "resume_token_ids": to_ids(own)[:2] if ids is None else ids,
        "resume_text": text(own[:2]) if earlier is None else earlier,
    }
    with pytest.raises(ModelError, match=r"^INVALID_ARG: resume_token_ids "):
        await collect(triton, ask("scripted", "{{chunks=5}}", {}, **flags, **resume))
