"""Requests to the engine of one model: their prompts, adapters, numbers and errors."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from typing import Any

import triton_python_backend_utils as pb_utils
from continuation import continue_generation
from engine_host import EngineHost
from generation_request import (
    MAX_PIXELS_AT_ONCE,
    GenerationRequest,
    RefusedError,
    count_pixels,
    decode_images,
    open_images,
)
from pixel_gate import PixelGate
from server_metrics import ServerMetrics
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.structured_output.backend_guidance import process_for_additional_properties

# Members whose schemas are of the same value as their neighbours'.
_OF_ONE_VALUE = ("allOf", "anyOf", "oneOf", "$ref")


def has_parts_of_objects(schema: Any) -> bool:
    """Return whether several schemas may describe one object: none of them names all of its members."""
    if isinstance(schema, list):
        return any(map(has_parts_of_objects, schema))
    if not isinstance(schema, dict):
        return False
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    if "properties" in schema and any(name in schema for name in _OF_ONE_VALUE):
        return True
    return any(map(has_parts_of_objects, schema.values()))


class EngineRequests:
    """The engine's side of calls and sessions. Used on the engine's loop."""

    def __init__(self, host: EngineHost, model_name: str, metrics: ServerMetrics) -> None:
        self.host = host
        self.model_name = model_name
        self.metrics = metrics
        self.lora_ids = {name: number for number, name in enumerate(host.lora_paths, start=1)}
        self.numbers = itertools.count(1)
        self.pixels = PixelGate(MAX_PIXELS_AT_ONCE)
        constraints = host.config.structured_outputs_config
        self.uses_guidance = constraints.backend == "guidance"
        self.takes_whitespace = not constraints.disable_any_whitespace

    def check_lora(self, request: GenerationRequest) -> None:
        if request.lora_name is not None and request.lora_name not in self.lora_ids:
            known = ", ".join(self.lora_ids) or "none"
            raise RefusedError(f"unknown lora_name {request.lora_name!r}; known: {known}")

    def adapt_schema(self, sampling: SamplingParams) -> None:
        """llguidance takes alternatives of `oneOf` that may overlap only if it may join them (`anyOf`).

        It lets a model add members without end to an object; as xgrammar, which vLLM would choose, this
        does not, where the schema does not name them.
        """
        wanted = sampling.structured_outputs
        if wanted is None or wanted.json is None or not self.uses_guidance:
            return
        try:
            schema = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
        except ValueError:
            return  # vLLM refuses it
        if isinstance(schema, dict):
            if not has_parts_of_objects(schema):
                schema = process_for_additional_properties(schema)
            options = {"coerce_one_of": True, "whitespace_flexible": self.takes_whitespace}
            wanted.json = schema | {"x-guidance": options}

    async def render(self, request: GenerationRequest) -> tuple[dict[str, Any], int]:
        """The tokenized prompt and its length; raises RefusedError when it does not fit."""
        if self.host.pools:
            await self.refuse_generation()
        self.adapt_schema(request.sampling)
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if (ids := request.prompt_ids) is not None:
            if not ids:
                raise RefusedError("prompt_token_ids must have at least one id")
            prompt = {"prompt_token_ids": ids}
        if request.images:
            if not self.host.takes_images:
                raise RefusedError(f"image: model {self.model_name} has no vision")
            rendered = await self.tokenize_with_images(prompt, request.images)
        else:
            rendered = await self.tokenize(prompt)
        limit = self.host.max_model_len
        length = len(rendered["prompt_token_ids"])
        wanted = request.sampling.max_tokens or 1
        if length + wanted > limit:
            raise RefusedError(
                f"the prompt of {length} tokens and max_tokens={wanted} together exceed the "
                f"model's length of {limit} tokens"
            )
        self.metrics.prompt_tokens += length
        return rendered, length

    async def tokenize(self, prompt: dict[str, Any]) -> dict[str, Any]:
        parsed = parse_model_prompt(self.host.config.model_config, prompt)
        (rendered,) = await self.host.engine.renderer.render_cmpl_async([parsed])
        return rendered

    async def tokenize_with_images(
        self, prompt: dict[str, Any], encoded: list[bytes]
    ) -> dict[str, Any]:
        """Decodes the images, which the rendered prompt holds as the model's tensors alone."""
        images = await asyncio.to_thread(open_images, encoded)
        async with self.pixels.hold(count_pixels(images)):
            decoded = await asyncio.to_thread(decode_images, images)
            return await self.tokenize(prompt | {"multi_modal_data": {"image": decoded}})

    async def refuse_generation(self) -> None:
        """Raise RefusedError for a generation of a pooling model, or the error of its dead engine.

        Health checks are generations of one token, so the engine runs one token here, too.
        """
        task: Any = self.host.config.model_config.get_pooling_task(
            await self.host.engine.get_supported_tasks()
        )
        prompt = {"prompt_token_ids": [0]}
        async for _ in self.host.engine.encode(prompt, PoolingParams(task=task), self.next_id()):
            self.metrics.prompt_tokens += 1
        raise RefusedError(f"model {self.model_name} is a pooling model: it generates no text")

    def generate(
        self, request: GenerationRequest, prompt: dict[str, Any], engine_id: str
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs, for one reader. A generator that is closed early aborts in the engine."""
        engine, lora = self.host.engine, self.lora_of(request)
        if request.resumed is not None:
            return continue_generation(engine, request, prompt, engine_id, lora)
        return engine.generate(
            prompt, request.sampling, engine_id, prompt_text=request.prompt, lora_request=lora
        )

    async def add(
        self, request: GenerationRequest, prompt: dict[str, Any], engine_id: str
    ) -> RequestOutputCollector:
        """Starts a generation whose outputs vLLM puts into the returned collector."""
        return await self.host.engine.add_request(
            engine_id, prompt, request.sampling, lora_request=self.lora_of(request)
        )

    def next_id(self) -> str:
        return f"{self.model_name}-{next(self.numbers)}"

    def lora_of(self, request: GenerationRequest) -> LoRARequest | None:
        if (name := request.lora_name) is None:
            return None
        return LoRARequest(name, self.lora_ids[name], self.host.lora_paths[name])

    def explain(self, error: Exception) -> tuple[str, str]:
        """Code and message of the error that ended a request (docs/engine_errors.md)."""
        if isinstance(error, RefusedError | VLLMClientError):
            return "INVALID_ARG", str(error)
        if isinstance(error, EngineDeadError):
            return "UNAVAILABLE", f"the engine of model {self.model_name} died"
        if isinstance(error, GracefulHTTPError):
            return "UNAVAILABLE", str(error)
        cause = error.__cause__ or error
        message = f"{type(cause).__name__}: {cause}"
        pb_utils.Logger.log_error(f"request of model {self.model_name} failed: {message}")
        return "INTERNAL", message
