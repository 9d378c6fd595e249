"""Serving of messages: requests to results, and results to messages.

Independent of how a client waits: a route awaits or streams them, a batch reads them later.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from app.api.anthropic.message_events import PING, MessageEvents, error_event
from app.api.anthropic.messages import MessageShape, message_to_wire
from app.api.anthropic.schemas import MessageRequest, TokenCountRequest
from app.api.container import Services
from app.api.hosted_tools import check_hosted, warnings_of
from app.api.output_rules import choose_rules
from app.core.errors import ServiceError, invalid_field
from app.core.off_loop import off_loop
from app.inference.images import measure
from app.inference.model_registry import Model
from app.results.drafts import GroupRequest, Prompt, check_image_count
from app.results.multi_result import GroupEvent
from app.results.pooling import wrong_task
from app.results.rendering import measure_images, render
from app.results.rows import ResultRow
from app.results.streams.result_reader import KeepAlive, TextDelta


@dataclass(slots=True, frozen=True)
class PreparedMessage:
    """A request, ready to be sent."""

    group: GroupRequest
    shape: MessageShape
    silence_seconds: float
    warnings: dict[str, str]  # headers

    def answer(self, rows: Sequence[ResultRow]) -> dict[str, Any]:
        return message_to_wire(self.shape, rows[0])

    async def encode(
        self, ids: Sequence[UUID], events: AsyncGenerator[GroupEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """The stream's events. An error is one of them."""
        message = MessageEvents(self.shape, ids[0])
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        has_begun = False
        try:
            async for _, event in events:
                chunk = b"" if has_begun else message.begin()
                has_begun = True
                if isinstance(event, KeepAlive):
                    chunk += PING
                elif isinstance(event, TextDelta):
                    chunk += await off_loop(len(event.text), partial(message.text, event.text))
                else:
                    chunk += await off_loop(len(event.row.text), partial(message.end, event.row))
                if not chunk and clock() - sent_at > self.silence_seconds:
                    chunk = PING  # a long call is sent when it is complete
                if chunk:
                    sent_at = clock()
                    yield chunk
        except ServiceError as error:
            yield error_event(error)


async def prepare_message(
    services: Services, team_id: str, request: MessageRequest
) -> PreparedMessage:
    check_hosted(services.settings.hosted_tools, request.hosted)
    model = await _choose(services, team_id, request)
    use = request.to_tool_use(model.format)
    messages, arguments = request.to_messages(model.format), request.to_template_arguments()
    options = request.to_send_options(use)
    rules, options = await choose_rules(model.format, messages, arguments, options, use)
    prompt = Prompt(messages=messages, template_arguments=arguments)
    group = GroupRequest(model.full_name, [prompt], options, cuts_max_tokens=True)
    shape = MessageShape.of(request, model.full_name, rules)
    warnings = warnings_of([*request.hosted.values()])
    return PreparedMessage(group, shape, services.settings.keep_alive_seconds, warnings)


async def count_tokens(services: Services, team_id: str, request: TokenCountRequest) -> int:
    """Tokens of a conversation as the engine counts them; an image whose tokens are unknown has one.

    Raises InvalidRequestError.
    """
    check_hosted(services.settings.hosted_tools, request.hosted)
    model = await _choose(services, team_id, request)
    request.to_tool_use(model.format)
    assert model.format is not None
    messages = request.to_messages(model.format)
    check_image_count(measure(messages), services.settings.max_images)
    rendered = await render(model, messages, request.to_template_arguments())
    count = await model.format.count_tokens(rendered)
    if count is None:
        raise invalid_field("model", f"model {model.name} has no tokenizer that this service reads")
    images = await measure_images(model, await services.images.fetched(team_id, messages))
    return count + (images or {}).get("tokens", 0)


async def _choose(services: Services, team_id: str, request: TokenCountRequest) -> Model:
    model = await services.registry.choose(request.model, team_id)
    if (error := wrong_task(model)) is not None:
        raise error
    if model.format is None or not model.has_chat:
        raise invalid_field(
            "messages", f"model {model.name} has no chat template; send a prompt to /v1/completions"
        )
    return model
