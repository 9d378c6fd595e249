"""Serving of OpenAI's responses: preparation of a request, and the frames of its events.

A response is a result; its request's echo is stored with it, in the same statement.
"""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import orjson

from app.api.container import Services
from app.api.hosted_tools import check_hosted, warnings_of
from app.api.openai.chat_messages import MAX_MESSAGES
from app.api.openai.response_events import ResponseEvents
from app.api.openai.responses_output import answer_message
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.stored_responses import StoredRequest, from_response_id, stored_of
from app.api.output_rules import choose_rules
from app.api.sse import KEEP_ALIVE
from app.auth.principal import Principal
from app.core.errors import NotFoundError, invalid_field
from app.core.off_loop import off_loop
from app.inference.images import measure, without_images
from app.inference.prompts import PromptFormat
from app.results.drafts import GroupRequest, Prompt
from app.results.requests import MAX_PROMPT_CHARACTERS
from app.results.streams.result_reader import (
    AttemptStarted,
    Ended,
    KeepAlive,
    Position,
    ResultReader,
    TextDelta,
)


@dataclass(slots=True, frozen=True)
class PreparedResponse:
    """A request for a response, ready to be sent, and its echo."""

    group: GroupRequest
    stored: StoredRequest
    warnings: dict[str, str]  # headers


async def prepare_response(
    services: Services, principal: Principal, create: ResponseCreate
) -> PreparedResponse:
    if create.background and create.store is False:
        raise invalid_field("store", "must be true in the background, because it is read later")
    check_hosted(services.settings.hosted_tools, create.hosted)
    model = await services.registry.choose(create.model, principal.team_id)
    create = create.model_copy(update={"model": model.full_name})  # returned in the response
    chat = create.to_chat()
    use = chat.to_tool_use(model.format)
    messages, arguments = chat.to_messages(model.format), chat.to_template_arguments()
    if create.previous_response_id is not None:
        earlier = await _conversation(
            services, principal.team_id, create.previous_response_id, model.format
        )
        own = 1 if create.instructions else 0  # only the new request's instructions apply
        messages = _bounded(
            [*messages[:own], *earlier, *messages[own:]], services.settings.max_body_bytes
        )
    options = chat.to_send_options(use)
    rules, options = await choose_rules(model.format, messages, arguments, options, use)
    defaults = model.format.default_parameters if model.format is not None else None
    request = create.to_stored(rules, defaults or {})
    stored = StoredRequest.of(request)
    assert stored is not None
    group = GroupRequest(
        model=model.full_name,
        prompts=[Prompt(messages=messages, template_arguments=arguments)],
        options=options,
        on_disconnect="continue" if create.background else "cancel",
        request=request,
        store=create.store is not False,
        waits_for_model=bool(create.background),
    )
    warnings = warnings_of([*create.hosted.values()])
    return PreparedResponse(group, stored.counted_by(rules.count_tokens), warnings)


async def _conversation(
    services: Services, team_id: str, response_id: str, prompt_format: PromptFormat | None
) -> list[dict[str, Any]]:
    """The messages up to a response and its own message, without its instructions."""
    name = "previous_response_id"
    try:
        row = await services.results.get(team_id, from_response_id(response_id))
        stored = stored_of(row)
        context = await services.contexts.get(team_id, row.context_id)
    except NotFoundError:
        raise invalid_field(name, f"there is no response {response_id!r}") from None
    if row.state != "completed":
        raise invalid_field(
            name, f"response {response_id} is not completed, so it cannot be continued"
        )
    messages = context.messages or []
    members = prompt_format.reasoning_members if prompt_format is not None else ()
    answer = await off_loop(len(row.text), lambda: answer_message(stored, row, members))
    return [*messages[1 if stored.has_instructions else 0 :], answer]


def _bounded(messages: list[dict[str, Any]], most_of_images: int) -> list[dict[str, Any]]:
    """Conversations grow: their texts have the bound of a prompt, their images that of a body."""
    name = "previous_response_id"
    size = len(orjson.dumps([without_images(message) for message in messages]))
    if len(messages) > MAX_MESSAGES or size > MAX_PROMPT_CHARACTERS:
        raise invalid_field(
            name,
            f"the conversation has {len(messages)} messages of {size} bytes; at most {MAX_MESSAGES} "
            f"of {MAX_PROMPT_CHARACTERS} are taken",
        )
    images = measure(messages)
    if images is not None and images["characters"] > most_of_images:
        raise invalid_field(
            name,
            f"the conversation has images of {images['characters']} bytes as data URIs; at most "
            f"{most_of_images} are taken (LLM_MAX_BODY_BYTES)",
        )
    return messages


async def response_frames(
    services: Services, team_id: str, result_id: UUID, events: ResponseEvents, *, resumable: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a response, until its end (`events.is_over`) or a new attempt."""
    yield events.begin()
    # From the start: events that the reader has are left out by their numbers.
    reader = ResultReader(
        services.hub,
        services.results,
        team_id,
        result_id,
        Position(),
        services.settings.keep_alive_seconds,
    )
    async with contextlib.aclosing(reader.events()) as happened:
        async for one in happened:
            if isinstance(one, KeepAlive):
                yield KEEP_ALIVE
            elif isinstance(one, TextDelta):
                yield await off_loop(len(one.text), partial(events.text, one.text))
            elif isinstance(one, Ended):
                yield await off_loop(one.row.output_size, partial(events.end, one.row))
                return
            elif isinstance(one, AttemptStarted):
                number = one.position.attempt
                frames = events.attempt(number)
                if frames is None:
                    yield events.restarted(number)
                    return
                yield frames
    if not resumable:
        yield events.error(
            "stopping", "The stream ended early: this process of the service is stopping."
        )
