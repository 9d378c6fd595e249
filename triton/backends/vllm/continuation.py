"""Continuation of a lost generation from the token ids of its output.

The engine gets the ids behind the prompt and generates the rest of the budget. Its stop conditions
on tokens count from there. Text and stop strings need the state of the lost generation: a fresh
detokenizer of vLLM's is fed the ids as output, and takes the engine's new tokens from there on.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from generation_request import GenerationRequest, RefusedError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, SamplingType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

# Parameters whose effect depends on where the prompt ends, and the value that has no effect.
# Absent on purpose: repetition_penalty counts a token once, in the prompt or in the output.
NEUTRAL = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bad_words": [],
    "logprobs": None,
    "logprob_token_ids": None,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "extra_args": None,
    "trace_decode_token_ids": None,
}
# Tokens fed to the detokenizer before other requests get their turn: half a millisecond.
REPLAY_TOKENS = 256


async def continue_generation(
    engine: AsyncLLM,
    request: GenerationRequest,
    prompt: dict[str, Any],
    request_id: str,
    lora: LoRARequest | None,
) -> AsyncGenerator[RequestOutput]:
    """The outputs behind request.resumed, as AsyncLLM.generate() yields them for a whole request.

    Raises RefusedError when the rest could differ from that of the lost generation.
    """
    assert request.resumed is not None
    ids, text = request.resumed.token_ids, request.resumed.text
    check_parameters(engine, request)
    check_ids(engine, request.sampling, ids)
    tasks = await engine.get_supported_tasks()
    # Holds the original parameters, with the end tokens of the model's generation config.
    whole = engine.input_processor.process_inputs(request_id, prompt, request.sampling, tasks)
    detokenizer = IncrementalDetokenizer.from_new_request(engine.tokenizer, whole)
    finish_reason = await replay(detokenizer, whole.sampling_params, ids)
    released = detokenizer.get_next_output_text(finish_reason is not None, delta=True)
    output = start_output(text_behind(released, text))
    if finish_reason is None:
        prompt = {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *ids]}
        sampling = rest_of(request.sampling, len(ids))
        rest = engine.generate(prompt, sampling, request_id, lora_request=lora)
        async with aclosing(rest):  # aborts in the engine when a stop string ends the loop
            async for step in rest:
                finish_reason = advance(output, detokenizer, step.outputs[0])
                if finish_reason is not None:
                    break
                if request.stream:
                    yield wrap(request_id, output)
                    output = start_output("")
    output.finish_reason = finish_reason
    yield wrap(request_id, output)


def check_parameters(engine: AsyncLLM, request: GenerationRequest) -> None:
    obstacles = [
        name for name, neutral in NEUTRAL.items() if getattr(request.sampling, name) != neutral
    ]
    if request.sampling.sampling_type is SamplingType.RANDOM_SEED:
        obstacles.append("seed")  # the state of its random numbers is lost
    if request.images:
        obstacles.append("image")  # some models attend to the whole prompt in both directions
    if engine.model_config.logits_processors:
        obstacles.append("the engine's logits_processors")
    if engine.vllm_config.watermark_config is not None:
        obstacles.append("the engine's watermark_config")
    if obstacles:
        raise RefusedError(f"resume_token_ids cannot be used with {', '.join(obstacles)}")


def check_ids(engine: AsyncLLM, sampling: SamplingParams, ids: list[int]) -> None:
    if len(ids) > sampling.max_tokens:
        raise RefusedError(
            f"resume_token_ids has {len(ids)} ids, more than max_tokens={sampling.max_tokens}"
        )
    size = engine.model_config.get_vocab_size()
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise RefusedError(f"resume_token_ids must be in the vocabulary: from 0 to {size - 1}")


async def replay(
    detokenizer: IncrementalDetokenizer, sampling: SamplingParams, ids: list[int]
) -> str | None:
    """Feeds the ids; returns the finish reason when they end the generation."""
    ends = {sampling.eos_token_id, *sampling.stop_token_ids}
    finish_reason = "length" if len(ids) == sampling.max_tokens else None
    if ids and ids[-1] in ends:
        finish_reason = "stop"
    is_past_end = not ends.isdisjoint(ids[:-1])
    for start in range(0, len(ids), REPLAY_TOKENS):
        part = ids[start : start + REPLAY_TOKENS]
        if detokenizer.update(part, finish_reason == "stop" and part[-1] in ends):
            finish_reason = "stop"
            is_past_end = detokenizer.num_output_tokens() < len(ids)
            break
        await asyncio.sleep(0)
    if is_past_end:
        raise RefusedError("resume_token_ids has ids behind the end of the output")
    return finish_reason


def text_behind(released: str, received: str) -> str:
    """The part of `released` that the client has not received."""
    if not as_received(released).startswith(as_received(received)):
        raise RefusedError("resume_token_ids and resume_text do not match for this model")
    return released[len(received) :]


def as_received(text: str) -> str:
    """The text as a response encodes it, without the NUL that PostgreSQL cannot store. Keeps the
    number of characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def rest_of(sampling: SamplingParams, done: int) -> SamplingParams:
    """The parameters of the engine's request. It generates tokens only."""
    rest = sampling.clone()
    rest.max_tokens -= done
    rest.min_tokens = max(0, rest.min_tokens - done)
    rest.stop = []
    rest.detokenize = False
    rest.output_kind = RequestOutputKind.DELTA
    return rest


def advance(
    output: CompletionOutput, detokenizer: IncrementalDetokenizer, step: CompletionOutput
) -> str | None:
    """Adds the engine's new tokens to the output; returns the finish reason."""
    before = detokenizer.num_output_tokens()
    finish_reason = step.finish_reason
    if detokenizer.update(list(step.token_ids), finish_reason == "stop"):
        finish_reason = "stop"
    # The detokenizer drops tokens behind a stop string.
    output.token_ids += step.token_ids[: detokenizer.num_output_tokens() - before]
    output.text += detokenizer.get_next_output_text(finish_reason is not None, delta=True)
    return finish_reason


def start_output(text: str) -> CompletionOutput:
    return CompletionOutput(0, text, [], cumulative_logprob=None, logprobs=None)


def wrap(request_id: str, output: CompletionOutput) -> RequestOutput:
    return RequestOutput(request_id, None, None, None, [output], output.finished())
