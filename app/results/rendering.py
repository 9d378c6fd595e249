"""Chat messages to a prompt, by the chat template of their model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from app.core.off_loop import off_loop
from app.inference.image_size import count_pixels
from app.inference.images import IMAGES, measure, move_behind_tools, to_parts, uris_of
from app.inference.model_registry import Model
from app.results.drafts import no_chat, no_vision


async def render(
    model: Model, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
) -> str:
    """The prompt as it is sent to the engine, with the template's places for images.

    Raises InvalidRequestError for messages that the model cannot take, and TemplatesBusyError.
    """
    if model.format is None or not model.has_chat:
        raise no_chat(model)
    if any(one.get(IMAGES) for one in messages):
        if not await model.format.takes_images():
            raise no_vision(model)
        has_tool_images = any(one["role"] == "tool" and one.get(IMAGES) for one in messages)
        if has_tool_images and not await model.format.takes_images_of_tools():
            messages = move_behind_tools(messages)
        messages = [to_parts(one) for one in messages]
    return model.format.for_engine(await model.format.render(messages, arguments))


async def measure_images(
    model: Model, messages: list[dict[str, Any]] | None
) -> dict[str, int] | None:
    """Count, characters, pixels and, if they are known, tokens of messages' images; None without images.

    The tokens are those that the engine adds to the places in the rendered prompt.
    """
    images = measure(messages)
    if images is None or messages is None:
        return None
    pixels = partial(count_pixels, uris_of(messages))
    images["pixels"] = await off_loop(images["characters"], pixels)
    if model.format is not None:
        tokens = await model.format.image_tokens(messages)
        images |= {} if tokens is None else {"tokens": tokens}
    return images
