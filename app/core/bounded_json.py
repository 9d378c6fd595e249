"""Validation of a client's JSON before it is stored: bounded in size and depth."""

from typing import Any

import orjson
from pydantic_core import PydanticCustomError

_INT64 = 2**63


def check_json(value: Any, *, max_bytes: int, max_depth: int, refuses_nul: bool = True) -> Any:
    """Return the value; raise a validation error if it is too large, too deep or not storable.

    Not storable are infinities, integers beyond 64 bits, NUL (PostgreSQL) and lone surrogates (UTF-8).
    NUL is, as an escape in JSON text that is parsed again: `refuses_nul` is False there.
    """
    _check(value, max_depth, max_depth, refuses_nul)
    if len(orjson.dumps(value)) > max_bytes:
        raise PydanticCustomError("too_large", f"must not exceed {max_bytes} bytes as JSON")
    return value


def _check(value: Any, depth_left: int, max_depth: int, refuses_nul: bool) -> None:
    if isinstance(value, dict | list):
        if not depth_left:
            raise PydanticCustomError("too_deep", f"must not be nested deeper than {max_depth}")
        if isinstance(value, dict):
            for name in value:
                _check_text(name, refuses_nul)
        for member in value.values() if isinstance(value, dict) else value:
            _check(member, depth_left - 1, max_depth, refuses_nul)
    elif isinstance(value, str):
        _check_text(value, refuses_nul)
    elif isinstance(value, float):
        if value - value != 0:  # infinite, or no number
            raise PydanticCustomError("not_finite", "numbers must be finite")
    elif isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise PydanticCustomError("too_large", "integers must fit 64 bits")


def _check_text(text: str, refuses_nul: bool) -> None:
    if refuses_nul and "\x00" in text:
        raise PydanticCustomError("nul", "must not hold the character NUL (U+0000)")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "must not hold half a surrogate pair") from None
