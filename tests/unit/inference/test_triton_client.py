"""Tensors to Triton and back, without a server; what each error means."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from app.core.errors import TritonUnavailableError
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import (
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
    UnclearError,
    to_model_error,
)
from app.inference.triton_messages import Delta, build_request, read_response


def inputs(request: pb.ModelInferRequest) -> dict[str, Any]:
    """The inputs as Triton's own client library reads them."""
    found: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        assert list(tensor.shape) == [1]
        if tensor.datatype == "BYTES":
            (found[tensor.name],) = deserialize_bytes_tensor(raw)
        else:
            assert tensor.datatype == "BOOL"
            (found[tensor.name],) = np.frombuffer(raw, dtype=bool)
    return found


@pytest.mark.parametrize("prompt", ["a", "", "é🙂\n\0", "x" * 100_000])
def test_a_request_is_what_the_vllm_backend_reads(prompt: str) -> None:
    parameters = {"max_tokens": 5, "stop": ["é"], "temperature": 0.5}
    request = build_request("m", prompt, parameters)
    sent = inputs(request)
    assert request.model_name == "m"
    assert sent.pop("text_input").decode() == prompt
    assert json.loads(sent.pop("sampling_parameters")) == parameters
    assert sent == {
        "stream": True, "exclude_input_in_output": True, "return_finish_reason": True,
        "return_num_input_tokens": True, "return_num_output_tokens": True,
        "return_logprobs": False,
    }  # fmt: skip
    assert [output.name for output in request.outputs] == [
        "text_output", "finish_reason", "num_input_tokens", "num_output_tokens",
    ]  # fmt: skip


def test_logprobs_are_asked_for_only_when_wanted() -> None:
    for value, wanted in ((0, True), (5, True), (None, False)):
        request = build_request("m", "x", {"logprobs": value})
        assert bool(inputs(request)["return_logprobs"]) is wanted
        assert ("logprobs" in [output.name for output in request.outputs]) is wanted


def test_requests_do_not_share_their_tensors() -> None:
    first, second = build_request("a", "one", {}), build_request("b", "two", {})
    assert inputs(first)["text_input"] == b"one"
    assert inputs(second)["text_input"] == b"two"


def response(version: str = "3", **tensors: str | int | bytes) -> pb.ModelInferResponse:
    """A response as Triton encodes it."""
    message = pb.ModelInferResponse(model_version=version)
    for name, value in tensors.items():
        message.outputs.add(name=name)
        if isinstance(value, int):
            message.raw_output_contents.append(struct.pack("<I", value))
        else:
            encoded = value.encode() if isinstance(value, str) else value
            array = np.array([encoded], dtype=object)
            message.raw_output_contents.append(serialize_byte_tensor(array).item())
    return message


def test_a_response_is_read_whole() -> None:
    delta = read_response(
        response(
            text_output="é🙂",
            finish_reason="stop",
            num_input_tokens=70_000,
            num_output_tokens=2,
            logprobs='[{"1": {"logprob": -0.5}}]',
        )
    )
    assert (delta.text, delta.finish_reason) == ("é🙂", "stop")
    assert (delta.prompt_tokens, delta.completion_tokens) == (70_000, 2)
    assert delta.logprobs is not None
    assert json.loads(delta.logprobs) == [{"1": {"logprob": -0.5}}]
    assert delta.model_version == 3


class Call:
    """A call that yields the given responses, and ends on request."""

    def __init__(self, *responses: pb.ModelInferResponse) -> None:
        self._responses = responses
        self.has_ended = asyncio.Event()
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> AsyncIterator[pb.ModelStreamInferResponse]:
        for one in self._responses:
            yield pb.ModelStreamInferResponse(infer_response=one)
        await self.has_ended.wait()


class Client(TritonClient):
    """A client whose calls are made up."""

    def __init__(self, call: Call) -> None:
        super().__init__("localhost:1")
        self._infer = lambda _, metadata: call


async def test_the_last_token_is_the_end_and_the_call_is_left_to_end_by_itself() -> None:
    late = response(text_output="late")
    call = Call(response(text_output="a"), response(text_output="b", finish_reason="stop"), late)
    client, heard = Client(call), list[Delta]()
    await client.run("m", "x", {}, heard.append)
    assert [delta.text for delta in heard] == ["a", "b"]
    assert len(client._abandoned) == 1
    call.has_ended.set()
    await asyncio.wait(client._abandoned)
    assert not call.is_cancelled
    assert [delta.text for delta in heard] == ["a", "b"]


async def test_a_call_that_ends_without_a_last_token_is_over() -> None:
    call = Call(response(text_output="a"))
    call.has_ended.set()
    client, heard = Client(call), list[Delta]()
    await client.run("m", "x", {}, heard.append)
    assert [(delta.text, delta.finish_reason) for delta in heard] == [("a", None)]


async def test_an_error_of_the_listener_is_its_own() -> None:
    call = Call(response(text_output="a"), response(text_output="b"))
    call.has_ended.set()
    heard: list[Delta] = []

    def break_down(delta: Delta) -> None:
        heard.append(delta)
        raise KeyError("a bug")

    client = Client(call)
    with pytest.raises(KeyError):
        await client.run("m", "x", {}, break_down)
    assert len(heard) == 1


@pytest.mark.parametrize("reason", ["", "None", "null"])
def test_no_reason_yet(reason: str) -> None:
    assert read_response(response(text_output="x", finish_reason=reason)).finish_reason is None


def test_tensors_may_be_missing_or_empty() -> None:
    delta = read_response(response(version=""))
    assert (delta.text, delta.finish_reason, delta.logprobs) == ("", None, None)
    assert (delta.prompt_tokens, delta.completion_tokens, delta.model_version) == (0, 0, None)
    empty = pb.ModelInferResponse()
    for name in ("text_output", "num_input_tokens"):
        empty.outputs.add(name=name)
        empty.raw_output_contents.append(b"")
    assert read_response(empty).text == ""


def test_text_that_postgres_cannot_hold_is_replaced() -> None:
    assert read_response(response(text_output="a\0b")).text == "a\ufffdb"
    assert read_response(response(text_output=b"a\xffb\xed\xa0\x80")).text.startswith(
        "a\ufffdb\ufffd"
    )


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("null", None),
        ("", None),
        (r'[{"t": "\u0000"}]', [{"t": "\ufffd"}]),
        (r'[{"t": "a\\u0000"}]', [{"t": r"a\u0000"}]),
        (r'[{"t": "a\\\u0000"}]', [{"t": "a\\\ufffd"}]),
        (r'[{"t": "\u0000\u0000"}]', [{"t": "\ufffd\ufffd"}]),
        ('[{"p": -Infinity, "t": " NaN"}]', [{"p": None, "t": " NaN"}]),
        ('[{"p": NaN, "q": Infinity}]', [{"p": None, "q": None}]),
    ],
)
def test_logprobs_are_json_that_postgres_can_hold(given: str, kept: Any) -> None:
    logprobs = read_response(response(logprobs=given)).logprobs
    assert (None if logprobs is None else orjson.loads(logprobs)) == kept


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("INVALID_ARG: no such thing", RefusedError, "no such thing"),
        ("UNAVAILABLE: the engine died", StreamLostError, "the engine died"),
        ("INTERNAL: it broke", ModelFailedError, "it broke"),
        ("INTERNAL: the prompt 'x is not ready'", ModelFailedError, "the prompt 'x is not ready'"),
        ("INVALID_ARG: unknown model in a prompt\nof two lines", RefusedError,
         "unknown model in a prompt\nof two lines"),
        ("Stub process 'm_0_0' is not healthy.", ModelDeadError,
         "Stub process 'm_0_0' is not healthy."),
        ("Request for unknown model: 'm' is not found", NotTakenError,
         "Request for unknown model: 'm' is not found"),
        ("Request for unknown model: 'm' has no available versions", NotTakenError,
         "Request for unknown model: 'm' has no available versions"),
        ("Error generating stream: boom\0", UnclearError, "Error generating stream: boom\ufffd"),
    ],
)  # fmt: skip
def test_what_a_models_error_means(message: str, kind: type[GenerationError], text: str) -> None:
    error = to_model_error(message)
    assert type(error) is kind
    assert str(error) == text


async def test_a_name_that_resolves_to_nothing_has_taken_nothing() -> None:
    async with TritonClient("a..b:8001") as client:
        with pytest.raises(NotTakenError):
            await client.run("m", "x", {}, lambda _: None)


@pytest.mark.parametrize(
    ("given", "dialled"),
    [("[::1]:1", "[::1]:1"), ("host", "host:8001"), ("http://10.0.0.1:2/", "10.0.0.1:2")],
)
def test_an_address_is_dialled_as_grpc_reads_it(given: str, dialled: str) -> None:
    assert TritonClient(given).address == dialled


def test_a_constraint_is_sent_as_the_text_that_nvidias_backend_reads() -> None:
    request = build_request("m", "x", {"structured_outputs": {"choice": ["a"]}})
    sent = orjson.loads(inputs(request)["sampling_parameters"])
    assert orjson.loads(sent["structured_outputs"]) == {"choice": ["a"]}


def test_a_code_counts_at_the_beginning_of_a_message_only() -> None:
    """A model's text may contain anything."""
    error = to_model_error("the model printed INVALID_ARG: no")
    assert type(error) is ModelFailedError


async def test_a_triton_that_never_answers_is_unavailable() -> None:
    """It accepts the connection and no more: a suspended process, or a machine that hangs."""
    connected: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connected.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, TritonClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(TritonUnavailableError) as raised:
            await client._call(client._stub.ServerReady, pb.ServerReadyRequest(), 0.2)
        for writer in connected:
            writer.close()
    assert raised.value.headers == {"Retry-After": "5"}
