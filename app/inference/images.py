"""Images of chat messages: data URIs, kept with the text, and their places in it (docs/vision.md)."""

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from app.core.errors import InvalidRequestError
from app.core.whole_numbers import WHOLE

MAX_MESSAGE_IMAGES = 64  # of one message, before the setting of a whole request
_MAX_CHARACTERS = 100_000_000  # no body is larger
_MAX_URL = 2_048  # characters of a URL that is fetched
_DATA_URI = re.compile(r"data:(image/[a-z]+);base64,")
# The first bytes of each media type.
BEGINNINGS = {
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


def check_url(url: str) -> str:
    """A data URI of an image, or the http or https URL of one; raises a validation error for others."""
    if is_remote(url):
        if len(url) > _MAX_URL:
            raise _error(f"a URL has at most {_MAX_URL} characters")
        return url
    found = _DATA_URI.match(url)
    if found is None or found[1] not in BEGINNINGS:
        known = ", ".join(BEGINNINGS)
        raise _error(
            f"must be `data:TYPE;base64,...` with one of the types {known}, or an http or https URL"
        )
    check_content(found[1], url[found.end() :])
    return url


def is_remote(url: str) -> bool:
    """Return whether an image is elsewhere: `app/results/image_urls.py` fetches it, or refuses it."""
    return url[:8].lower().startswith(("http://", "https://"))


def check_content(media_type: str, encoded: str) -> None:
    """Raise a validation error unless the text is base64 of an image of this type."""
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _error(f"is not base64: {error}") from None
    if not content.startswith(BEGINNINGS[media_type]):
        raise _error(f"the content is not of type {media_type}")


class Image(BaseModel):
    """An image of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, Field(max_length=_MAX_CHARACTERS), AfterValidator(check_url)] = Field(
        description="A data URI of a PNG, JPEG, GIF or WebP image, or its URL if LLM_IMAGE_URLS is on."
    )
    after: Annotated[int, Field(ge=0), WHOLE] = Field(
        0, description="Characters of the text before it."
    )


Images = Annotated[list[Image], Field(max_length=MAX_MESSAGE_IMAGES)]


def checked_image(url: str, after: int = 0) -> Image:
    """An image of a URL that `check_url` or `check_content` has accepted."""
    return Image.model_construct(url=url, after=after)


def join_pieces(pieces: Iterable[str | Image]) -> dict[str, Any]:
    """The members of a message: its texts as lines of its content, its images between them."""
    texts: list[str] = []
    images: list[Image] = []
    length = 0
    for piece in pieces:
        if isinstance(piece, str):
            length += len(piece) + bool(texts)
            texts.append(piece)
        else:
            images.append(checked_image(piece.url, length))
    return {"content": "\n".join(texts)} | to_member(images)


def join_messages(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The members of one message for two; the text of the later one begins a line."""
    before, behind = earlier["content"], later["content"]
    start = len(before) + bool(before and behind)
    moved = [
        one | {"after": start + one["after"] if one["after"] else len(before)}
        for one in later.get(IMAGES, ())
    ]
    images = [*earlier.get(IMAGES, ()), *moved]
    texts = [text for text in (before, behind) if text]
    return {"content": "\n".join(texts)} | ({IMAGES: images} if images else {})


def to_member(images: Sequence[Image] | None) -> dict[str, Any]:
    """The member of a stored message; nothing for a message without images."""
    return {IMAGES: [one.model_dump() for one in images]} if images else {}


def measure(messages: Sequence[Mapping[str, Any]] | None) -> dict[str, int] | None:
    """Count and characters of the images of stored messages; None if there are none."""
    uris = uris_of(messages or ())
    return {"count": len(uris), "characters": sum(map(len, uris))} if uris else None


def uris_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    return [one["url"] for message in messages for one in message.get(IMAGES, ())]


def without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != IMAGES}


def to_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A stored message as templates take it: its content as parts, if it has images."""
    rest = without_images(message)
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
    """Probes of a chat template for places of images, in users' messages and in results of tools.

    Each is rendered once.
    """

    def __init__(self) -> None:
        self._known: dict[bool, bool] = {}
        self._probing = asyncio.Lock()

    async def takes(self, render: Render, *, of_tools: bool = False) -> bool:
        """Raises TemplatesBusyError."""
        async with self._probing:
            if of_tools not in self._known:
                self._known[of_tools] = await _has_places(render, _AFTER if of_tools else [])
        return self._known[of_tools]


_CALL = {
    "id": "lookcall1",  # Mistral's templates accept only nine letters and digits
    "type": "function",
    "function": {"name": "look", "arguments": {}},
}
# The messages before the result of a tool.
_AFTER: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]


async def _has_places(render: Render, before: list[dict[str, Any]]) -> bool:
    text = {"type": "text", "text": _MARK}
    last = {"role": "tool", "tool_call_id": "lookcall1", "name": "look"} if before else _USER
    try:
        without = await render([*before, last | {"content": [text]}])
        rendered = await render([*before, last | {"content": [{"type": "image"}, text]}])
    except InvalidRequestError:
        return False
    # A template for texts alone shows the parts as data.
    is_data = any(rendered.count(name) > without.count(name) for name in ("'type'", '"type"'))
    return rendered != without and _MARK in rendered and not is_data


_USER = {"role": "user"}


def move_behind_tools(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the images of tools' results in the user's message behind them."""
    moved: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            waiting += message.get(IMAGES, ())
            moved.append(without_images(message))
            continue
        if waiting:
            moved.append(_USER | {"content": "", IMAGES: _at_start(waiting)})
            waiting = []
            if message["role"] == "user":
                moved[-1] |= message | join_messages(moved[-1], message)
                continue
        moved.append(message)
    if waiting:
        moved.append(_USER | {"content": "", IMAGES: _at_start(waiting)})
    return moved


def _at_start(images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one | {"after": 0} for one in images]
