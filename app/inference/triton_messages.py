"""The messages of a generation: a request's tensors, and the meaning of a response's.

This module builds and reads protobuf messages directly: the client library's numpy wrappers cost more
than the call (docs/benchmarks.md). Tensors: NVIDIA's vLLM backend,
https://github.com/triton-inference-server/vllm_backend; token ids are of the backends in triton/ alone.
"""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tritonclient.grpc import service_pb2 as pb

from app.inference.images import IMAGES


@dataclass(slots=True)
class Delta:
    """One response of the stream. Token counts are those of this response alone."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    logprobs: str | None
    model_version: int | None
    token_ids: bytes | None = None  # little-endian INT32; None where the model returns none
    prompt_logprobs: str | None = None  # in one response
    vector: bytes | None = None  # little-endian FP32, of a pooling model


@dataclass(slots=True, frozen=True)
class EarlierText:
    text: str
    token_ids: bytes  # little-endian INT32


def input_tensor(
    name: str, datatype: str, length: int = 1
) -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[length])


def _output(name: str) -> pb.ModelInferRequest.InferRequestedOutputTensor:
    return pb.ModelInferRequest.InferRequestedOutputTensor(name=name)


_TRUE, _FALSE = b"\x01", b"\x00"
_FLAGS = (
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
)
_INPUTS = [
    input_tensor("text_input", "BYTES"),
    input_tensor("sampling_parameters", "BYTES"),
    *(input_tensor(name, "BOOL") for name in _FLAGS),
]
_OUTPUTS = [
    _output(name)
    for name in ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
]
_LOGPROBS = _output("logprobs")
_PROMPT_LOGPROBS = _output("prompt_logprobs")
PROMPT_LOGPROBS_INPUT = "return_prompt_logprobs"
PROMPT_IDS_INPUT = "prompt_token_ids"
IMAGE_INPUT = "image"
CANCEL_INPUT = "cancel_request_id"
RESUME_INPUT = "resume_token_ids"
POOLING_INPUT = "pooling_request"
_POOLING_INPUTS = [input_tensor("text_input", "BYTES"), input_tensor(POOLING_INPUT, "BYTES")]
_POOLING_OUTPUTS = [_output(name) for name in ("vector", "finish_reason", "num_input_tokens")]
_TOKEN_IDS = _output("token_ids")
_RETURN_TOKEN_IDS = input_tensor("return_token_ids", "BOOL")
ID_BYTES = 4  # of a token id
_ALL_TRUE = [_TRUE] * len(_FLAGS)


# An escaped NUL in JSON, after any number of escaped backslashes.
_NUL_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def bytes_element(value: bytes) -> bytes:
    """One element of a BYTES tensor: its length as 4 little-endian bytes, then itself."""
    return struct.pack("<I", len(value)) + value


def without_prompt_ids(
    parameters: dict[str, Any],
) -> tuple[dict[str, Any], Sequence[int] | None]:
    """The sampling parameters alone, and the prompt's token ids where it is sent as such."""
    if PROMPT_IDS_INPUT not in parameters:
        return parameters, None
    rest = dict(parameters)
    return rest, rest.pop(PROMPT_IDS_INPUT)


def build_request(
    model: str,
    prompt: str,
    parameters: dict[str, Any],
    request_id: str = "",
    *,
    returns_ids: bool = False,
    earlier: EarlierText | None = None,
) -> pb.ModelInferRequest:
    """The request that `model` continue `prompt`, streamed and with no echo.

    The parameter `images` has the images of the prompt as base64.
    """
    wants_logprobs = parameters.get("logprobs") is not None
    parameters, prompt_ids = without_prompt_ids(parameters)
    images: Sequence[bytes] = parameters.get(IMAGES, ())
    parameters = {name: value for name, value in parameters.items() if name != IMAGES}
    if "structured_outputs" in parameters:  # NVIDIA's backend reads it as JSON text
        text = orjson.dumps(parameters["structured_outputs"]).decode()
        parameters = parameters | {"structured_outputs": text}
    request = pb.ModelInferRequest(
        id=request_id,
        model_name=model,
        inputs=_INPUTS,
        outputs=[*_OUTPUTS, _LOGPROBS] if wants_logprobs else _OUTPUTS,
        raw_input_contents=[
            bytes_element(prompt.encode()),
            bytes_element(orjson.dumps(parameters)),
            *_ALL_TRUE[1:],
            _TRUE if wants_logprobs else _FALSE,
        ],
    )
    if parameters.get("prompt_logprobs") is not None:
        request.inputs.append(input_tensor(PROMPT_LOGPROBS_INPUT, "BOOL"))
        request.outputs.append(_PROMPT_LOGPROBS)
        request.raw_input_contents.append(_TRUE)
    if prompt_ids is not None:
        request.inputs.append(input_tensor(PROMPT_IDS_INPUT, "INT32", len(prompt_ids)))
        request.raw_input_contents.append(struct.pack(f"<{len(prompt_ids)}i", *prompt_ids))
    if images:
        request.inputs.append(input_tensor(IMAGE_INPUT, "BYTES", len(images)))
        request.raw_input_contents.append(b"".join(map(bytes_element, images)))
    if returns_ids:
        request.inputs.append(_RETURN_TOKEN_IDS)
        request.outputs.append(_TOKEN_IDS)
        request.raw_input_contents.append(_TRUE)
    if earlier is not None:
        count = len(earlier.token_ids) // ID_BYTES
        request.inputs.append(input_tensor(RESUME_INPUT, "INT32", count))
        request.inputs.append(input_tensor("resume_text", "BYTES"))
        request.raw_input_contents.append(earlier.token_ids)
        request.raw_input_contents.append(bytes_element(earlier.text.encode()))
    return request


def build_pooling_request(
    model: str, prompt: str, parameters: dict[str, Any], request_id: str
) -> pb.ModelInferRequest:
    """The request that `model` compute the vector of `prompt`, or the scores of its texts."""
    parameters, prompt_ids = without_prompt_ids(parameters)
    content = prompt if prompt_ids is None else prompt_ids
    if parameters["task"] == "score":
        content = orjson.loads(prompt)
    asked = orjson.dumps({"input": content, "parameters": parameters})
    return pb.ModelInferRequest(
        id=request_id,
        model_name=model,
        inputs=_POOLING_INPUTS,
        outputs=_POOLING_OUTPUTS,
        raw_input_contents=[bytes_element(b""), bytes_element(asked)],
    )


def build_cancellation(model: str, request_id: str) -> pb.ModelInferRequest:
    """The request that `model` end the request with this id; only the backends in triton/ accept it."""
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[input_tensor("text_input", "BYTES"), input_tensor(CANCEL_INPUT, "BYTES")],
        raw_input_contents=[bytes_element(b""), bytes_element(request_id.encode())],
    )


def read_response(response: pb.ModelInferResponse) -> Delta:
    """Read one response; NUL, which PostgreSQL cannot store, becomes U+FFFD."""
    tensors = {
        output.name: content
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    text = _first_text(tensors.get("text_output"))
    finish_reason = _first_text(tensors.get("finish_reason"))
    return Delta(
        text=text.replace("\x00", "\ufffd") if "\x00" in text else text,
        finish_reason=finish_reason if finish_reason not in ("", "None", "null") else None,
        prompt_tokens=_first_count(tensors.get("num_input_tokens")),
        completion_tokens=_first_count(tensors.get("num_output_tokens")),
        logprobs=read_logprobs(_first_text(tensors.get("logprobs"))),
        model_version=int(response.model_version) if response.model_version else None,
        token_ids=tensors.get("token_ids"),
        prompt_logprobs=read_logprobs(_first_text(tensors.get("prompt_logprobs"))),
        vector=tensors.get("vector"),
    )


def _first_text(content: bytes | None) -> str:
    if not content:
        return ""
    (length,) = struct.unpack_from("<I", content)
    return content[4 : 4 + length].decode("utf-8", errors="replace")


def _first_count(content: bytes | None) -> int:
    return int.from_bytes(content[:4], "little") if content else 0


def read_logprobs(text: str) -> str | None:
    """The JSON text of log probabilities, as PostgreSQL's jsonb can hold it."""
    if text in ("", "null"):
        return None
    if "NaN" in text or "Infinity" in text:  # Python writes them; JSON has no such numbers
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
    return _NUL_ESCAPE.sub(r"\1\\ufffd", text) if r"\u0000" in text else text
