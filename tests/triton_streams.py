"""Streams to Triton with every tensor of the vLLM backends, for what the service never asks."""

import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

RETURNS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
_NUMBERS = {"FP32": "<f", "UINT32": "<I", "INT32": "<i"}


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
        if isinstance(value, list):
            request.inputs.add(name=name, datatype="INT32", shape=[len(value)])
            request.raw_input_contents.append(struct.pack(f"<{len(value)}i", *value))
            continue
        datatype = "BOOL" if isinstance(value, bool) else "BYTES"
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        if isinstance(value, bool):
            request.raw_input_contents.append(bytes([value]))
        else:
            content = value.encode()
            request.raw_input_contents.append(struct.pack("<I", len(content)) + content)
    return request


async def stream(address: str, request: pb.ModelInferRequest) -> AsyncIterator[dict[str, Any]]:
    """The responses as lists by output name. Raises ModelError."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        async for response in stub.ModelStreamInfer(iter([request])):
            if response.error_message:
                raise ModelError(response.error_message)
            yield _read(response.infer_response)


async def collect(address: str, request: pb.ModelInferRequest) -> list[dict[str, Any]]:
    """All responses of one request."""
    return [response async for response in stream(address, request)]


def text(responses: list[dict[str, Any]]) -> str:
    """The whole text of a stream with one output."""
    return "".join(response["text_output"][0] for response in responses)


def _read(response: pb.ModelInferResponse) -> dict[str, Any]:
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
