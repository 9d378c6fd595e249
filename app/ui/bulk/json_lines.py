"""Lines of JSON, whole for every reader."""

import orjson

# JSON may hold them as they are; Python's `splitlines`, for one, ends a line there.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def to_line(value: object) -> bytes:
    """A value as a line of JSON. Raises TypeError for one that is nested too deep."""
    line = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    if not line.isascii():
        for end, escape in _LINE_ENDS:
            line = line.replace(end, escape)
    return line
