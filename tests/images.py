"""Small PNG images, made without a library."""

import base64
import struct
import zlib

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
