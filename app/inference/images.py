"""Images of chat messages: data URIs, kept with the text, and their places in it (docs/vision.md)."""

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from app.core.errors import InvalidRequestError

MAX_MESSAGE_IMAGES = 64  # of one message, before the setting of a whole request
_MAX_CHARACTERS = 100_000_000  # no body is larger
_DATA_URI = re.compile(r"data:(image/[a-z]+);base64,")
# The first bytes of each media type.
_BEGINNINGS = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
IMAGES = "images"  # the member of a message, and the stored parameter
_MARK = "image-probe"

Render = Callable[[list[dict[str, Any]]], Awaitable[str]]


def _error(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def _check_url(url: str) -> str:
    found = _DATA_URI.match(url)
    if url[:5].lower() in ("http:", "https"):
        raise _error("URLs are not fetched: send the image as a data URI")
    if found is None or found[1] not in _BEGINNINGS:
        known = ", ".join(_BEGINNINGS)
        raise _error(f"must be `data:TYPE;base64,...` with one of the types {known}")
    try:
        content = base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _error(f"is not base64: {error}") from None
    if not content.startswith(_BEGINNINGS[found[1]]):
        raise _error(f"the content is not of type {found[1]}")
    return url


class Image(BaseModel):
    """An image of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, Field(max_length=_MAX_CHARACTERS), AfterValidator(_check_url)] = Field(
        description="A data URI of a PNG, JPEG, GIF or WebP image; no other URL is taken."
    )
    after: int = Field(0, ge=0, description="Characters of the text before it.")


Images = Annotated[list[Image], Field(max_length=MAX_MESSAGE_IMAGES)]


def to_member(images: Sequence[Image] | None) -> dict[str, Any]:
    """The member of a stored message; nothing for a message without images."""
    return {IMAGES: [one.model_dump() for one in images]} if images else {}


def measure(messages: Sequence[Mapping[str, Any]] | None) -> dict[str, int] | None:
    """Count and characters of the images of stored messages; None if there are none."""
    urls = [one["url"] for message in messages or () for one in message.get(IMAGES, ())]
    return {"count": len(urls), "characters": sum(map(len, urls))} if urls else None


def to_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A stored message as templates take it: its content as parts, if it has images."""
    rest = {name: value for name, value in message.items() if name != IMAGES}
    if not message.get(IMAGES):
        return rest
    content, parts, at = message["content"], list[dict[str, str]](), 0
    for after in sorted(one["after"] for one in message[IMAGES]):
        if after > at:
            parts.append({"type": "text", "text": content[at:after]})
            # Texts of parts are joined as lines.
            at = after + content.startswith("\n", after)
        parts.append({"type": "image"})
    if at < len(content):
        parts.append({"type": "text", "text": content[at:]})
    return rest | {"content": parts}


def to_base64(url: str) -> bytes:
    """The content of a data URI as the backends' tensor has it."""
    return url.partition(",")[2].encode()


class ImageTemplate:
    """Probe of a chat template for places of images; rendered once."""

    def __init__(self) -> None:
        self._takes: bool | None = None
        self._probing = asyncio.Lock()

    async def takes(self, render: Render) -> bool:
        """Raises TemplatesBusyError."""
        async with self._probing:
            if self._takes is None:
                self._takes = await _has_places(render)
        return self._takes


async def _has_places(render: Render) -> bool:
    text = {"type": "text", "text": _MARK}
    try:
        without = await render([{"role": "user", "content": [text]}])
        rendered = await render([{"role": "user", "content": [{"type": "image"}, text]}])
    except InvalidRequestError:
        return False
    # A template for texts alone shows the parts as data.
    is_data = "'type'" in rendered or '"type"' in rendered
    return rendered != without and _MARK in rendered and not is_data
