"""Lines of JSON, whole for every reader."""

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
# JSON may hold them as they are; Python's `splitlines`, for one, ends a line there.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def to_line(value: Any) -> bytes:
    """A value as a line of JSON."""
    line = _encode(value)
    if not line.isascii():
        for end, escape in _LINE_ENDS:
            line = line.replace(end, escape)
    return line + b"\n"
