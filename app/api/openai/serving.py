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
    PromptText,
    TokenIds,
    completion,
)
from app.api.openai.schemas import DONE, Frames, OpenAIRequest, error_frame
from app.api.output_rules import choose_rules
from app.api.sse import KEEP_ALIVE
from app.core.errors import ServiceError, invalid_field
from app.core.off_loop import off_loop
from app.inference.model_registry import Model
from app.results.drafts import GroupRequest, Prompt
from app.results.multi_result import GroupEvent
from app.results.pooling import wrong_task
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


async def prepare_chat(services: Services, team_id: str, request: ChatRequest) -> PreparedRequest:
    model = await services.registry.choose(request.model, team_id)
    request = request.model_copy(update={"model": model.full_name})  # returned in the response
    if (error := wrong_task(model)) is not None:
        raise error
    if not model.has_chat:
        raise invalid_field(
            "messages", f"model {model.name} has no chat template; send a prompt to /v1/completions"
        )
    use = request.to_tool_use(model.format)
    messages, arguments = request.to_messages(model.format), request.to_template_arguments()
    options = request.to_send_options(use)
    rules, options = await choose_rules(model.format, messages, arguments, options, use)
    prompt = Prompt(messages=messages, template_arguments=arguments)
    return PreparedRequest(
        group=GroupRequest(
            model.full_name, [prompt], options, n=request.n or 1, store=request.store is not False
        ),
        answer=lambda rows: chat_completion(request, rules, rows),
        new_frames=lambda ids: ChatFrames(request, rules, ids),
        request=request,
        with_tokens=bool(request.logprobs),
        silence_seconds=services.settings.keep_alive_seconds,
    )


async def prepare_completion(
    services: Services, team_id: str, request: CompletionRequest
) -> PreparedRequest:
    model = await services.registry.choose(request.model, team_id)
    request = request.model_copy(update={"model": model.full_name})  # returned in the response
    options = request.to_send_options()
    is_scored = request.is_scored
    prompts = [await read_prompt(model, one, is_scored=is_scored) for one in request.prompt]
    texts = [one.text for one in prompts]
    return PreparedRequest(
        group=GroupRequest(
            model.full_name,
            [Prompt(content=one.content or one.text, token_ids=one.token_ids) for one in prompts],
            options,
            request.rows_per_prompt,
            store=request.store is not False,
        ),
        answer=lambda rows: completion(request, prompts, rows),
        new_frames=lambda ids: CompletionFrames(request, texts, ids),
        request=request,
        with_tokens=request.logprobs is not None,
        silence_seconds=services.settings.keep_alive_seconds,
    )


async def read_prompt(
    model: Model, prompt: str | TokenIds, *, is_scored: bool = False
) -> PromptText:
    """A prompt's text; its token ids too, if the model's tokenizer makes others of the text."""
    if isinstance(prompt, str):
        return PromptText(prompt, await _first_token(model, prompt) if is_scored else "")
    prompt_format = model.format
    if prompt_format is None or (decoded := await prompt_format.decode(prompt)) is None:
        raise invalid_field(
            "prompt",
            f"model {model.name} does not have these token ids, or has no tokenizer here; send the "
            "text",
        )
    text = await prompt_format.text_of(prompt)
    first = (await prompt_format.decode(prompt[:1]) or "") if is_scored else ""
    if text and "\x00" not in text:
        return PromptText(decoded, first, content=text)
    return PromptText(decoded.replace("\x00", "\ufffd"), first, token_ids=prompt)


async def _first_token(model: Model, text: str) -> str:
    return "" if model.format is None else await model.format.first_token(text)
