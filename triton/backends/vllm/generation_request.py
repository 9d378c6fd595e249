"""One generation request: Triton's tensors to vLLM's parameters, and vLLM's outputs back."""

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from grammar_watch import reason_of
from PIL import Image, UnidentifiedImageError
from pydantic import TypeAdapter, ValidationError
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

_SAMPLING = TypeAdapter(SamplingParams)
# Fields of SamplingParams that are no request's business.
_INTERNAL = {"output_kind", "skip_clone", "output_text_buffer_length", "detokenize"}
_ALLOWED = {name for name in SamplingParams.__struct_fields__ if name[0] != "_"} - _INTERNAL
_RETURN_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_prompt_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
)
# Pillow has readers for many formats; these are safe to read from strangers.
IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MAX_IMAGE_PIXELS = 32_000_000  # 96 MB as RGB
MAX_PIXELS_AT_ONCE = 2 * MAX_IMAGE_PIXELS  # that are decoded, for all requests of a model
# JSON has no infinity; vLLM's own server writes impossible tokens this way.
_LEAST_LOGPROB = -9999.0


class RefusedError(ValueError):
    """The request itself is wrong; the message names the tensor or the parameter."""


@dataclass
class Resumed:
    """The client's part of the lost generation that the request continues."""

    token_ids: list[int]  # of the output, from its first token on
    text: str


@dataclass
class GenerationRequest:
    """One request of a client. Built inside execute(): Triton's tensors are not valid later."""

    prompt: str
    sampling: SamplingParams
    lora_name: str | None
    stream: bool
    echo: bool  # the prompt precedes the output
    wanted: frozenset[str]  # the return_* inputs that are true
    resumed: Resumed | None
    prompt_ids: list[int] | None = None  # the prompt as the engine reads it, instead of its text
    images: list[bytes] = field(default_factory=list)  # as base64


def read_request(triton_request: Any, defaults: dict[str, Any]) -> GenerationRequest:
    """`defaults`: the model's own sampling parameters. Raises RefusedError."""
    inputs = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in triton_request.inputs()}
    if "embedding_request" in inputs:
        raise RefusedError("embedding_request is not supported: send pooling_request")
    stream = bool(inputs["stream"][0]) if "stream" in inputs else False
    resumed = read_resumed(inputs)
    exclude = inputs.get("exclude_input_in_output")
    # NVIDIA's default: streams never echo the prompt, whole answers do.
    only_new = stream or resumed is not None
    echo = not (only_new if exclude is None else bool(exclude[0]))
    if only_new and echo:
        cause = "stream is true" if stream else "resume_token_ids is given"
        raise RefusedError(f"exclude_input_in_output cannot be false when {cause}")
    encoded = inputs["sampling_parameters"][0] if "sampling_parameters" in inputs else b"{}"
    sampling, lora_name = read_sampling(encoded, defaults)
    sampling.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    wanted = frozenset(name for name in _RETURN_FLAGS if name in inputs and inputs[name][0])
    if "return_token_ids" in wanted and sampling.n > 1:
        raise RefusedError(f"return_token_ids needs n=1, got n={sampling.n}")
    return GenerationRequest(
        prompt=decode("text_input", inputs["text_input"][0]),
        sampling=sampling,
        lora_name=lora_name,
        stream=stream,
        echo=echo,
        wanted=wanted,
        resumed=resumed,
        prompt_ids=inputs["prompt_token_ids"].tolist() if "prompt_token_ids" in inputs else None,
        images=list(inputs.get("image", ())),
    )


def read_resumed(inputs: dict[str, Any]) -> Resumed | None:
    ids = inputs.get("resume_token_ids")
    text = decode("resume_text", inputs["resume_text"][0]) if "resume_text" in inputs else ""
    if ids is None and text:
        raise RefusedError("resume_token_ids is required with resume_text")
    return None if ids is None else Resumed(ids.tolist(), text)


def decode(name: str, encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise RefusedError(f"{name} is not UTF-8: {error}") from None


def check_text(name: str, text: str) -> str:
    """JSON can have surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"{name} is not UTF-8: {error}") from None
    return text


def open_images(encoded: list[bytes]) -> list[Image.Image]:
    """The images with their sizes, not decoded yet. Raises RefusedError."""
    return [open_image(one) for one in encoded]


def open_image(encoded: bytes) -> Image.Image:
    try:
        content = base64.b64decode(encoded, validate=True)
        image = Image.open(BytesIO(content), formats=IMAGE_FORMATS)
    except (binascii.Error, UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        raise RefusedError(f"image is not a base64-encoded image: {error}") from None
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise RefusedError(
            f"image has {width} x {height} pixels; at most {MAX_IMAGE_PIXELS:,} are taken"
        )
    return image


def count_pixels(images: list[Image.Image]) -> int:
    return sum(image.width * image.height for image in images)


def decode_images(images: list[Image.Image]) -> list[Image.Image]:
    """Decodes images. Takes a second for a large one: not for the engine's loop."""
    try:
        return [image.convert("RGB") for image in images]
    except Exception as error:  # noqa: BLE001 - decoders raise anything for broken contents
        raise RefusedError(f"image cannot be decoded: {error}") from None


def read_sampling(encoded: bytes, defaults: dict[str, Any]) -> tuple[SamplingParams, str | None]:
    try:
        given = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise RefusedError("sampling_parameters must be a JSON object")
    return read_parameters(given, defaults)


def read_parameters(
    given: dict[str, Any], defaults: dict[str, Any]
) -> tuple[SamplingParams, str | None]:
    """vLLM's parameters and the LoRA name. Values may be strings ("0.7"), as old clients send
    them; structured_outputs may be JSON text. Null means the default."""
    given = defaults | {name: value for name, value in given.items() if value is not None}
    lora_name = given.pop("lora_name", None)
    if unknown := sorted(given.keys() - _ALLOWED):
        raise RefusedError(f"unknown sampling parameter: {', '.join(unknown)}")
    structured = given.get("structured_outputs")
    if isinstance(structured, str):
        try:
            given["structured_outputs"] = json.loads(structured)
        except ValueError as error:
            raise RefusedError(f"structured_outputs is not JSON: {error}") from None
    try:
        sampling = _SAMPLING.validate_python(given)
    except ValidationError as error:
        raise RefusedError(explain(error)) from None
    except VLLMClientError as error:
        raise RefusedError(str(error)) from None
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**63:
        raise RefusedError(f"seed must fit in 64 bits, got {sampling.seed}")
    return sampling, lora_name


def explain(error: ValidationError) -> str:
    """One line per wrong parameter. Each problem's location is (pydantic's alternative,
    parameter, ...); the first alternative only states that a dict is no SamplingParams."""
    lines = {}
    for problem in error.errors(include_url=False):
        if len(problem["loc"]) > 1:
            name = problem["loc"][1]
            lines.setdefault(name, f"{name}: {problem['msg']}, got {problem['input']!r:.100}")
    return "; ".join(lines.values()) or str(error)


@dataclass
class ResponseBuilder:
    """Turns vLLM's outputs of one request into Triton responses of n entries each."""

    request: GenerationRequest
    input_tokens: int
    finish_reasons: list[str] = field(init=False)
    cumulative: list[float] = field(init=False)
    output_tokens: int = 0  # of all responses so far

    def __post_init__(self) -> None:
        count = self.request.sampling.n
        self.finish_reasons = ["None"] * count  # NVIDIA's word for "not yet"
        self.cumulative = [float("nan")] * count
        self.prefix = self.request.prompt if self.request.echo else ""

    def build(self, output: RequestOutput) -> Any:
        count = self.request.sampling.n
        texts, tokens = [self.prefix] * count, [0] * count
        logprobs = ["null" if self.request.sampling.logprobs is None else "[]"] * count
        self.prefix = ""
        for part in output.outputs:
            texts[part.index] += part.text
            tokens[part.index] = len(part.token_ids)
            self.output_tokens += len(part.token_ids)
            if (reason := reason_of(part)) is not None:
                self.finish_reasons[part.index] = reason
            if part.cumulative_logprob is not None:
                self.cumulative[part.index] = part.cumulative_logprob
            if part.logprobs is not None and "return_logprobs" in self.request.wanted:
                logprobs[part.index] = encode_logprobs(part)
        tensors = [strings("text_output", texts), *self.returned(tokens, logprobs)]
        if "return_prompt_logprobs" in self.request.wanted and output.prompt_logprobs:
            tensors.append(strings("prompt_logprobs", [encode_positions(output.prompt_logprobs)]))
        if "return_token_ids" in self.request.wanted:
            tensors.append(numbers("token_ids", list(output.outputs[0].token_ids), np.int32))
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def returned(self, tokens: list[int], logprobs: list[str]) -> list[Any]:
        """The tensors that NVIDIA's return_* inputs ask for."""
        wanted = self.request.wanted
        tensors = []
        if "return_finish_reason" in wanted:
            tensors.append(strings("finish_reason", self.finish_reasons))
        if "return_cumulative_logprob" in wanted:
            tensors.append(numbers("cumulative_logprob", self.cumulative, np.float32))
        if "return_logprobs" in wanted:
            tensors.append(strings("logprobs", logprobs))
        if "return_num_input_tokens" in wanted:
            tensors.append(numbers("num_input_tokens", [self.input_tokens], np.uint32))
        if "return_num_output_tokens" in wanted:
            tensors.append(numbers("num_output_tokens", tokens, np.uint32))
        return tensors


def encode_logprobs(part: CompletionOutput) -> str:
    return encode_positions(part.logprobs)


def encode_positions(positions: Iterable[dict[int, Logprob] | None]) -> str:
    """A list of a dictionary per token, its own entry first; null for the prompt's first token."""
    return json.dumps([position and encode_position(position) for position in positions])


def encode_position(position: dict[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {
        token_id: {
            "logprob": max(entry.logprob, _LEAST_LOGPROB),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }


def strings(name: str, values: list[str]) -> Any:
    encoded = [value.encode("utf-8", "replace") for value in values]
    return pb_utils.Tensor(name, np.array(encoded, dtype=np.object_))


def numbers(name: str, values: list[Any], dtype: type) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))
