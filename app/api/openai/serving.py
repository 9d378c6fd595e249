"""Serving of OpenAI's completions: requests to groups of results, and results to responses.

Independent of how a client waits: a route awaits or streams them, a batch reads them later.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from app.api.container import Services
from app.api.openai.chat_responses import ChatFrames, chat_completion
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import (
    CompletionFrames,
    CompletionRequest,
    TokenIds,
    completion,
)
from app.api.openai.schemas import DONE, Frames, OpenAIRequest, error_frame
from app.api.sse import KEEP_ALIVE
from app.core.errors import ServiceError, invalid_field
from app.core.off_loop import off_loop
from app.inference.model_registry import Model
from app.results.drafts import GroupRequest, Prompt
from app.results.multi_result import GroupEvent
from app.results.rows import ResultRow
from app.results.streams.result_reader import KeepAlive, TextDelta


@dataclass(slots=True, frozen=True)
class PreparedRequest:
    """A request, ready to be sent. `answer` builds its body from the results' rows, in order."""

    group: GroupRequest
    answer: Callable[[Sequence[ResultRow]], dict[str, Any]]
    new_frames: Callable[[Sequence[UUID]], Frames]
    request: OpenAIRequest
    with_tokens: bool
    silence_seconds: float

    async def encode(
        self, ids: Sequence[UUID], events: AsyncGenerator[GroupEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """The stream's frames. An error is one of them, and `[DONE]` always ends them."""
        frames = self.new_frames(ids)
        rows: dict[int, ResultRow] = {}
        has_begun = False
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        try:
            async for place, event in events:
                if isinstance(event, KeepAlive):
                    yield KEEP_ALIVE
                    continue
                chunk = b"" if has_begun else frames.begin()
                has_begun = True
                if isinstance(event, TextDelta):
                    delta = partial(frames.delta, place, event.text, event.tokens)
                    chunk += await off_loop(len(event.text), delta)
                else:
                    chunk += await off_loop(
                        len(event.row.text), partial(frames.end, place, event.row)
                    )
                    rows[place] = event.row._replace(output=None, logprobs=None)
                if not chunk and clock() - sent_at > self.silence_seconds:
                    chunk = KEEP_ALIVE  # a long call is sent when it is complete
                if chunk:
                    sent_at = clock()
                    yield chunk
        except ServiceError as error:
            yield error_frame(error) + DONE
            return
        usage = b""
        if self.request.include_usage:
            usage = frames.usage([rows[place] for place in range(len(ids))])
        yield usage + DONE


async def prepare_chat(services: Services, request: ChatRequest) -> PreparedRequest:
    model = await services.registry.choose(request.model)
    request = request.model_copy(update={"model": model.name})  # returned in the response
    if not model.has_chat:
        raise invalid_field(
            "messages", f"model {model.name} has no chat template; send a prompt to /v1/completions"
        )
    use = request.to_tool_use(model.format)
    options = request.to_send_options(use)
    prompt = Prompt(
        messages=request.to_messages(model.format),
        template_arguments=request.to_template_arguments(),
    )
    return PreparedRequest(
        group=GroupRequest(
            model.name, [prompt], options, n=request.n or 1, store=request.store is not False
        ),
        answer=lambda rows: chat_completion(request, use, rows),
        new_frames=lambda ids: ChatFrames(request, use, ids),
        request=request,
        with_tokens=bool(request.logprobs),
        silence_seconds=services.settings.keep_alive_seconds,
    )


async def prepare_completion(services: Services, request: CompletionRequest) -> PreparedRequest:
    model = await services.registry.choose(request.model)
    request = request.model_copy(update={"model": model.name})  # returned in the response
    options = request.to_send_options()
    texts = [await _text_of(model, one) for one in request.prompt]
    return PreparedRequest(
        group=GroupRequest(
            model.name,
            [Prompt(content=text) for text in texts],
            options,
            request.rows_per_prompt,
            store=request.store is not False,
        ),
        answer=lambda rows: completion(request, texts, rows),
        new_frames=lambda ids: CompletionFrames(request, texts, ids),
        request=request,
        with_tokens=request.logprobs is not None,
        silence_seconds=services.settings.keep_alive_seconds,
    )


async def _text_of(model: Model, prompt: str | TokenIds) -> str:
    """The prompt's text: models receive texts, so token ids must be those of a text."""
    if isinstance(prompt, str):
        return prompt
    text = await model.format.text_of(prompt) if model.format is not None else None
    if not text or "\x00" in text:
        raise invalid_field(
            "prompt",
            f"model {model.name}'s tokenizer produces these token ids from no text; send the text",
        )
    return text
