"""Small PNG images, made without a library, and parts of messages by dialect."""

import base64
import struct
import zlib
from typing import Any

Color = tuple[int, int, int]
RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(color: Color, width: int = 4, height: int = 4) -> bytes:
    """A PNG of one colour."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(color) * width) * height
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


def data_uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png_uri(color: Color) -> str:
    return data_uri(png(color))


def is_image(part: str) -> bool:
    """Return whether a part of a message is an image; the others are texts."""
    return part.startswith("data:")


def chat_part(part: str) -> dict[str, Any]:
    """A part as OpenAI's chat completions have it."""
    if not is_image(part):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": part, "detail": "low"}}


def input_part(part: str) -> dict[str, Any]:
    """A part as OpenAI's responses have it."""
    if not is_image(part):
        return {"type": "input_text", "text": part}
    return {"type": "input_image", "detail": "auto", "image_url": part}


def block(part: str) -> dict[str, Any]:
    """A part as a block of Anthropic's messages."""
    if not is_image(part):
        return {"type": "text", "text": part}
    kind, _, data = part.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
