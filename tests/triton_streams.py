"""Streams to Triton with every tensor of the vLLM backends, for what the service never asks."""

import asyncio
import json
import secrets
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_access import grpc_headers

RETURNS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
_NUMBERS = {"FP32": "<f", "INT32": "<i", "UINT32": "<I"}


class ModelError(Exception):
    """The text of an error inside a stream."""


def ask(
    model: str,
    prompt: str,
    sampling: dict[str, Any] | None = None,
    *,
    request_id: str = "",
    **tensors: Any,
) -> pb.ModelInferRequest:
    """A request; `tensors` are further inputs by name, each a bool, a string or a list of INT32."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    given: dict[str, bool | str | list[int]] = {"text_input": prompt, **tensors}
    given["sampling_parameters"] = json.dumps(sampling or {})
    for name, value in given.items():
        if isinstance(value, bool):
            datatype, shape, content = "BOOL", 1, bytes([value])
        elif isinstance(value, str):
            encoded = value.encode()
            datatype, shape = "BYTES", 1
            content = struct.pack("<I", len(encoded)) + encoded
        else:
            datatype, shape, content = "INT32", len(value), struct.pack(f"<{len(value)}i", *value)
        request.inputs.add(name=name, datatype=datatype, shape=[shape])
        request.raw_input_contents.append(content)
    return request


async def stream(
    triton: EmbeddedTriton, request: pb.ModelInferRequest
) -> AsyncIterator[dict[str, Any]]:
    """The responses as lists by output name. Raises ModelError."""
    async with grpc.aio.insecure_channel(triton.address("grpc")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        error = ""
        async for response in stub.ModelStreamInfer(
            iter([request]), metadata=grpc_headers(triton.secret)
        ):
            error = error or response.error_message
            if not error:
                yield read_outputs(response.infer_response)
        # Not before the call's end: a call that is cancelled then can keep its model from unloading.
        if error:
            raise ModelError(error)


async def call(triton: EmbeddedTriton, method: str, message: object) -> Any:
    """The response to a request that is no stream."""
    async with grpc.aio.insecure_channel(triton.address("grpc")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return await getattr(stub, method)(message, metadata=grpc_headers(triton.secret))


async def collect(triton: EmbeddedTriton, request: pb.ModelInferRequest) -> list[dict[str, Any]]:
    """All responses of one request."""
    return [response async for response in stream(triton, request)]


async def check_cancellations(
    triton: EmbeddedTriton, model: str, ask_long: Callable[[str], pb.ModelInferRequest]
) -> None:
    """A cancellation ends the request that it names, whichever comes first; `ask_long` has its id."""

    async def cancel(request_id: str) -> None:
        assert await collect(triton, ask(model, "", cancel_request_id=request_id)) == []

    async def end(request_id: str) -> str:
        try:
            await collect(triton, ask_long(request_id))
        except ModelError as error:
            return str(error)
        return "not cancelled"

    # A model remembers ids that have ended: the test may run twice on one server.
    run = secrets.token_hex(4)
    async with asyncio.timeout(60):
        await cancel(f"{run} early")
        ends = [await end(f"{run} early")]
        for at_once in range(1, 12):
            ids = [f"{run} {at_once} {number}" for number in range(at_once)]
            runs = asyncio.gather(*(end(one) for one in ids))
            await asyncio.gather(*(cancel(one) for one in ids))
            ends += await runs
    assert {one.partition(":")[0] for one in ends} == {"CANCELLED"}


def text(responses: list[dict[str, Any]]) -> str:
    """The whole text of a stream with one output."""
    return "".join(response["text_output"][0] for response in responses)


def read_outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    return {
        output.name: _values(output.datatype, content)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _values(datatype: str, content: bytes) -> list[Any]:
    if datatype in _NUMBERS:
        return [number for (number,) in struct.iter_unpack(_NUMBERS[datatype], content)]
    values = []
    while content:
        (length,) = struct.unpack_from("<I", content)
        values.append(content[4 : 4 + length].decode())
        content = content[4 + length :]
    return values
