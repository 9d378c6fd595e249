"""Requests of an order in each dialect, and the interpretation of their responses."""

from collections.abc import Awaitable, Callable

from tests.chaos.storm import jobs
from tests.chaos.storm.client import Client
from tests.chaos.storm.dialects import anthropic, native, openai, pooling, reuse, tgi

DIALECTS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "native": native.native,
    "native, Prefer: wait": native.preferring_to_wait,
    "native, a list": native.native_list,
    "native, streamed": native.streamed,
    "native, no key": native.without_a_key,
    "native, embedding": native.embedding,
    "native, images": native.native,
    "native, scored": native.scored,
    "context, then send": native.saved_context,
    "equal requests": reuse.equal_requests,
    "OpenAI chat": openai.chat,
    "OpenAI chat, streamed": openai.streamed_chat,
    "OpenAI chat, images": openai.chat,
    "OpenAI completions, n=2": openai.completions,
    "OpenAI completions, scored": openai.scored_prompt,
    "OpenAI embeddings": pooling.embeddings,
    "OpenAI responses": openai.responses,
    "OpenAI batch": openai.batch,
    "Anthropic messages": anthropic.message,
    "Anthropic messages, streamed": anthropic.streamed_message,
    "Anthropic messages, images": anthropic.streamed_message,
    "rerank": pooling.rerank,
    "score": pooling.score,
    "TGI generate": tgi.generate,
    "TGI generate_stream": tgi.generate_stream,
    "Tenstorrent": tgi.tenstorrent,
    "job": jobs.job,
    "past its budget": jobs.past_its_budget,
}
