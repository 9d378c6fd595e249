"""Width and height of images, read from the first bytes of their formats."""

import base64
import binascii
from collections.abc import Iterable

Size = tuple[int, int]  # width, height

UNKNOWN_PIXELS = 32_000_000  # of an image whose bytes have no size: as many as our backend decodes
_HEAD = 64  # base64 characters that have the size of PNG and WebP
_MAX_SEGMENTS = 2_000  # of a JPEG or GIF before its size; cameras write some twenty
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))


def size_of(uri: str) -> Size | None:
    """The size of the image of a data URI; None if its bytes have none."""
    encoded = uri.partition(",")[2]
    try:
        if uri.startswith("data:image/jpeg"):
            return _jpeg(base64.b64decode(encoded))
        if uri.startswith("data:image/gif"):
            return _gif(base64.b64decode(encoded))
        return _size_at_start(base64.b64decode(encoded[:_HEAD]))
    except (binascii.Error, IndexError, ValueError):
        return None


def count_pixels(uris: Iterable[str]) -> int:
    """The pixels that an engine decodes for the images of these data URIs."""
    sizes = map(size_of, uris)
    return sum(UNKNOWN_PIXELS if size is None else size[0] * size[1] for size in sizes)


def _size_at_start(head: bytes) -> Size | None:
    if head.startswith(b"\x89PNG") and head[12:16] == b"IHDR" and len(head) >= 24:
        return _sized(int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head[12:16], head[20:30])
    return None


def _webp(chunk: bytes, content: bytes) -> Size | None:
    if chunk == b"VP8 ":  # after three bytes of the frame and three of its start code
        width, height = content[6:8], content[8:10]
        return _sized(
            int.from_bytes(width, "little") & 0x3FFF, int.from_bytes(height, "little") & 0x3FFF
        )
    if chunk == b"VP8L":  # after the signature: 14 bits each
        bits = int.from_bytes(content[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8X":  # after the flags: the canvas
        width, height = content[4:7], content[7:10]
        return 1 + int.from_bytes(width, "little"), 1 + int.from_bytes(height, "little")
    return None


def _jpeg(content: bytes) -> Size | None:
    at = 2
    for _ in range(_MAX_SEGMENTS):
        at = content.find(b"\xff", at)
        while at >= 0 and content[at : at + 2] == b"\xff\xff":  # fill bytes
            at += 1
        if at < 0 or at + 9 > len(content):
            return None
        marker = content[at + 1]
        if marker in _FRAMES:
            height, width = content[at + 5 : at + 7], content[at + 7 : at + 9]
            return _sized(int.from_bytes(width, "big"), int.from_bytes(height, "big"))
        length = int.from_bytes(content[at + 2 : at + 4], "big")
        at += 2 if marker in _WITHOUT_LENGTH else 2 + length
    return None


def _gif(content: bytes) -> Size | None:
    """The screen, or the first frame where that is larger: decoders make room for both.

    Raises IndexError for a file that ends before the frame.
    """
    if not content.startswith(b"GIF8"):
        return None
    colours = content[10]
    at = 13 + (3 << (colours & 7) + 1 if colours & 0x80 else 0)
    blocks = 0
    while content[at] == 0x21 and blocks < _MAX_SEGMENTS:  # an extension: its label, then blocks
        at += 2
        while content[at] and blocks < _MAX_SEGMENTS:
            at += 1 + content[at]
            blocks += 1
        at += 1
        blocks += 1
    frame = content[at + 1 : at + 9]
    if content[at] != 0x2C or len(frame) < 8 or blocks >= _MAX_SEGMENTS:
        return None
    left, top, width, height = _numbers(frame)
    screen_width, screen_height = _numbers(content[6:10])
    return _sized(max(screen_width, left + width), max(screen_height, top + height))


def _numbers(content: bytes) -> list[int]:
    return [int.from_bytes(content[at : at + 2], "little") for at in range(0, len(content), 2)]


def _sized(width: int, height: int) -> Size | None:
    return (width, height) if width and height else None
