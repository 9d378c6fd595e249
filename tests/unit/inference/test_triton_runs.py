"""Runs of a generation without a server: repetition, cancellation, and what a client leaves behind."""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.inference import triton_client
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import NotTakenError, RefusedError
from app.inference.triton_messages import RESUME_INPUT, Delta, read_response

UNEXPECTED = f"unexpected inference input '{RESUME_INPUT}' for model 'm'"


def piece(text: str, finish_reason: str = "") -> pb.ModelStreamInferResponse:
    message = pb.ModelInferResponse()
    for name, value in (("text_output", text), ("finish_reason", finish_reason)):
        message.outputs.add(name=name)
        message.raw_output_contents.append(struct.pack("<I", len(value)) + value.encode())
    return pb.ModelStreamInferResponse(infer_response=message)


def refusal(message: str) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(error_message=message)


class Client(TritonClient):
    """A client whose streams have these responses and stay open until `may_end` is set."""

    def __init__(self, *responses: pb.ModelStreamInferResponse) -> None:
        super().__init__("host:1")
        self._responses = responses
        self.is_open, self.may_end = asyncio.Event(), asyncio.Event()
        self.metadata: list[Any] = []  # of each stream
        self.queries = 0  # of a model's inputs, which have `resume_token_ids`
        self.abandoned: list[str | None] = []  # models of requests that still ran, else None
        self.cancelled: list[str] = []
        self._infer = self._open

    def _open(self, _: pb.ModelInferRequest, metadata: Any) -> Any:
        self.metadata.append(metadata)
        self.is_open.set()
        return self

    def cancel(self) -> None:
        """End the stream, as gRPC's call does."""
        self.may_end.set()

    async def __aiter__(self) -> AsyncIterator[pb.ModelStreamInferResponse]:
        for one in self._responses:
            yield one
        await self.may_end.wait()

    async def _query_inputs(self, model: str) -> set[str]:
        self.queries += 1
        return {RESUME_INPUT}

    def _abandon(
        self, call: Any, reading: "asyncio.Task[None]", request: pb.ModelInferRequest | None
    ) -> None:
        self.abandoned.append(None if request is None else request.model_name)
        super()._abandon(call, reading, request)

    async def _cancel_request(self, call: Any, request: pb.ModelInferRequest) -> None:
        self.cancelled.append(request.model_name)


async def run(client: Client, **options: Any) -> None:
    await client.run("m", "x", {}, lambda _: None, **options)


async def test_a_model_that_was_reloaded_is_asked_for_its_inputs_again() -> None:
    client = Client(refusal(UNEXPECTED))
    with pytest.raises(NotTakenError, match="the inputs of model m change"):
        await run(client, wants_ids=True)
    assert (len(client.metadata), client.queries) == (2, 2)


async def test_a_bias_is_refused_by_a_backend_that_cannot_read_it() -> None:
    client = Client()
    with pytest.raises(RefusedError, match=r"^logit_bias: the backend of model m"):
        await client.run("m", "x", {"logit_bias": {"5": 1.0}}, lambda _: None)
    assert client.metadata == []


async def test_other_refusals_are_final() -> None:
    client = Client(refusal("INVALID_ARG: no"))
    with pytest.raises(RefusedError):
        await run(client, wants_ids=True)
    assert len(client.metadata) == 1
    client = Client(refusal(UNEXPECTED))
    with pytest.raises(RefusedError):
        await run(client)  # it had not asked for ids
    assert (len(client.metadata), client.queries) == (1, 0)


async def test_a_trace_is_in_the_metadata() -> None:
    client = Client(piece("a", "stop"))
    client._headers = (("secret", "s"),)
    await run(client)
    await run(client, traceparent="00-1-2-01")
    assert client.metadata == [
        (("secret", "s"),),
        (("secret", "s"), ("traceparent", "00-1-2-01")),
    ]


async def test_only_a_request_that_still_runs_is_cancelled() -> None:
    ended, refused = Client(piece("a", "stop")), Client(refusal("INVALID_ARG: no"))
    await run(ended)
    with pytest.raises(RefusedError):
        await run(refused)
    assert ended.abandoned == refused.abandoned == [None]
    client = Client(piece("a"))
    running = asyncio.create_task(run(client))
    await client.is_open.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert client.abandoned == ["m"]
    await asyncio.sleep(0)
    assert client.cancelled == ["m"]
    for one in (ended, refused, client):
        assert one._abandoned
        one.may_end.set()
        await asyncio.wait(one._abandoned)
        await asyncio.sleep(0)
        assert not one._abandoned


async def test_a_generation_is_read_piece_by_piece() -> None:
    client = Client(piece("a"), piece("b", "stop"))
    assert [delta.text async for delta in client.generate("m", "x", {})] == ["a", "b"]
    client = Client(piece("a"), refusal("INVALID_ARG: no"))
    generation = client.generate("m", "x", {})
    assert (await anext(generation)).text == "a"
    with pytest.raises(RefusedError):
        await anext(generation)


async def test_a_generation_that_is_closed_has_ended() -> None:
    client = Client(piece("a"))
    before = asyncio.all_tasks()
    generation = client.generate("m", "x", {})
    assert (await anext(generation)).text == "a"
    await generation.aclose()
    assert client.abandoned == ["m"]
    assert asyncio.all_tasks() - before <= client._abandoned


async def test_a_client_closes_its_channel_after_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_client, "_EXIT_SECONDS", 60.0)
    may_end = asyncio.Event()

    async def call() -> None:
        await may_end.wait()

    client = TritonClient("127.0.0.1:1")
    await client.__aenter__()
    client._keep(asyncio.create_task(call()))
    closing = asyncio.create_task(client.__aexit__())
    await asyncio.wait({closing}, timeout=0.05)
    assert client._channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    may_end.set()
    await closing
    assert client._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_of_equal_versions_the_first_is_listed() -> None:
    answer = pb.RepositoryIndexResponse()
    for reason in ("first", "second"):
        answer.models.add(name="m", version="1", state="UNAVAILABLE", reason=reason)

    async def index(*_: Any, **__: Any) -> pb.RepositoryIndexResponse:
        return answer

    client = TritonClient("host:1")
    stub: Any = type("Stub", (), {"RepositoryIndex": staticmethod(index)})
    client._stub = stub
    assert [entry.reason for entry in await client.index()] == ["first"]


def read_tensors(**tensors: bytes) -> Delta:
    message = pb.ModelInferResponse()
    for name, content in tensors.items():
        message.outputs.add(name=name)
        message.raw_output_contents.append(content)
    return read_response(message)


def test_the_first_element_of_a_tensor_is_read() -> None:
    element = struct.pack("<I", 1) + b"a"
    delta = read_tensors(
        text_output=element * 2,
        num_input_tokens=struct.pack("<2I", 7, 9),
        num_output_tokens=struct.pack("<I", 3),
    )
    assert (delta.text, delta.prompt_tokens, delta.completion_tokens) == ("a", 7, 3)


def test_logprobs_that_are_json_stay_as_they_are() -> None:
    text = '[{"1":{"logprob":-0.5}}]'
    content = struct.pack("<I", len(text)) + text.encode()
    assert read_tensors(logprobs=content).logprobs == text
