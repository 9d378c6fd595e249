"""Requests to a pooling model: the vector of a text, or the scores of documents for a query."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from engine_requests import EngineRequests
from generation_request import RefusedError, decode, numbers, strings
from vllm import PoolingParams
from vllm.outputs import PoolingRequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import TokenizeParams

_PARAMETERS = {"task", "dimensions", "normalize", "raw", "truncate"}
_MAX_ID = 2**31


@dataclass(frozen=True)
class PoolingRequest:
    """A text, its token ids, or a query and its documents."""

    content: str | list[int] | tuple[str, ...]
    parameters: PoolingParams
    truncates: bool  # what exceeds the model's length; otherwise it is refused


def read_pooling_request(encoded: bytes) -> PoolingRequest:
    """Raises RefusedError."""
    try:
        given = json.loads(decode("pooling_request", encoded))
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"pooling_request is not JSON: {error}") from None
    if not isinstance(given, dict) or given.keys() != {"input", "parameters"}:
        raise RefusedError("pooling_request must be an object with input and parameters")
    parameters = given["parameters"]
    if not isinstance(parameters, dict):
        raise RefusedError("parameters must be an object")
    if unknown := sorted(parameters.keys() - _PARAMETERS):
        raise RefusedError(f"unknown parameter: {', '.join(unknown)}")
    is_score = parameters.get("task") == "score"
    if not is_score and parameters.get("task") != "embed":
        raise RefusedError("task must be embed or score")
    dimensions = parameters.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or is_score):
        raise RefusedError("dimensions must be an integer, and only of an embedding")
    is_plain = parameters.get("raw") is True if is_score else parameters.get("normalize") is False
    pooling = PoolingParams(
        task="classify" if is_score else "embed",
        dimensions=dimensions,
        use_activation=False if is_plain else None,
    )
    content = _read_documents(given["input"]) if is_score else _read_text(given["input"])
    return PoolingRequest(content, pooling, parameters.get("truncate") is True)


def _read_text(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value
    is_list = isinstance(value, list) and len(value) > 0
    if is_list and all(type(one) is int and 0 <= one < _MAX_ID for one in value):
        return value
    raise RefusedError("input must be a text, or a list of token ids")


def _read_documents(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list) and len(value) > 1
    if is_list and all(type(one) is str for one in value):
        return tuple(value)
    raise RefusedError("input must be a query and its documents")


class PoolingRequests:
    """Runs them on the engine. Used on the engine's loop."""

    def __init__(self, requests: EngineRequests) -> None:
        self.requests = requests
        self.host = requests.host

    async def run(self, request: PoolingRequest) -> Any:
        """The response with the numbers. Raises RefusedError."""
        await self.check_task(request)
        rendered = await self.render(request)
        lengths = [self.checked_length(prompt) for prompt, _ in rendered]
        self.requests.metrics.prompt_tokens += sum(lengths)
        vectors = await all_of([self.compute(*one) for one in rendered])
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("vector", np.concatenate(vectors)),
                strings("finish_reason", ["stop"]),
                numbers("num_input_tokens", [sum(lengths)], np.uint32),
            ]
        )

    def checked_length(self, prompt: dict[str, Any]) -> int:
        """The number of tokens. Raises RefusedError."""
        ids = prompt["prompt_token_ids"]
        limit = self.host.max_model_len
        if len(ids) > limit:
            raise RefusedError(
                f"the text of {len(ids)} tokens exceeds the model's length of {limit} tokens"
            )
        if max(ids) >= self.host.config.model_config.get_vocab_size():
            raise RefusedError(f"token id {max(ids)} is out of vocabulary")
        return len(ids)

    async def compute(self, prompt: dict[str, Any], parameters: PoolingParams) -> np.ndarray:
        vector = await last_of(self.host.engine.encode(prompt, parameters, self.requests.next_id()))
        if parameters.task == "classify" and vector.size != 1:
            raise RefusedError(f"the model has {vector.size} labels: a score needs a model of one")
        return vector

    async def check_task(self, request: PoolingRequest) -> None:
        name = self.requests.model_name
        if not self.host.pools:
            raise RefusedError(f"task: model {name} generates text, and computes nothing else")
        supported = await self.host.engine.get_supported_tasks()
        task = self.host.config.model_config.get_pooling_task(supported)
        if task != request.parameters.task:
            computes = {"embed": "embeddings", "classify": "scores"}.get(str(task), str(task))
            raise RefusedError(f"task: model {name} computes {computes}")

    async def render(self, request: PoolingRequest) -> list[tuple[dict[str, Any], PoolingParams]]:
        """The tokenized prompts, each with the parameters that name where its document begins."""
        renderer, config = self.host.engine.renderer, self.host.config.model_config
        tokens = renderer.default_cmpl_tok_params
        if request.truncates:
            tokens = tokens.with_kwargs(truncate_prompt_tokens=-1)
        if isinstance(request.content, tuple):
            query, *documents = request.content
            return [
                await self.render_pair(query, one, request.parameters.clone(), tokens)
                for one in documents
            ]
        if isinstance(request.content, str):
            prompt: dict[str, Any] = {"prompt": request.content}
        else:
            prompt = {"prompt_token_ids": request.content}
        (rendered,) = await renderer.render_cmpl_async([parse_model_prompt(config, prompt)], tokens)
        return [(rendered, request.parameters)]

    async def render_pair(
        self, query: str, document: str, parameters: PoolingParams, tokens: TokenizeParams
    ) -> tuple[dict[str, Any], PoolingParams]:
        rendered = await self.pairs.render_async(
            {
                "data_1": query,
                "data_2": document,
                "chat_template": None,
                "max_tokens_per_query": 0,
                "max_tokens_per_doc": 0,
                "tok_params": tokens,
                "prompt_extras": None,
                "skip_mm_cache": False,
                "params": parameters,
                "lora_requests": None,
                "priorities": 0,
            }
        )
        return rendered["prompts"], rendered["params"]

    @cached_property
    def pairs(self) -> Any:
        """vLLM's own reader of pairs: it knows each model's separators and templates."""
        from vllm.entrypoints.pooling.scoring.io_processor import CrossEncoderIOProcessor
        from vllm.renderers.chat_utils import ChatTemplateConfig

        engine = self.host.engine
        return CrossEncoderIOProcessor(self.host.config, engine.renderer, ChatTemplateConfig())


async def all_of(works: Sequence[Coroutine[Any, Any, np.ndarray]]) -> list[np.ndarray]:
    """All results in their order. If one fails, or this is cancelled, the engine aborts the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def last_of(outputs: AsyncGenerator[PoolingRequestOutput]) -> np.ndarray:
    """The numbers of a request. A generator that is closed early aborts in the engine."""
    vector = np.empty(0, np.float32)
    try:
        async for output in outputs:
            vector = output.outputs.data.float().cpu().numpy().reshape(-1).astype(np.float32)
    finally:
        await outputs.aclose()
    return vector
