"""Arguments of tool calls, and other texts of models, in a form that can be stored and sent back."""

import json
import math
import re
from typing import Any

_MAX_DEPTH = 64  # of arguments
_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse arguments that a model wrote, for storage; None unless they are a JSON object."""
    try:
        value = to_storable(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def to_storable(value: Any, depth_left: int = _MAX_DEPTH) -> Any:
    """Make JSON storable: no NUL, no half of a surrogate pair, no number beyond JSON's or 64 bits.

    Raises ValueError if it is nested too deep.
    """
    if isinstance(value, str):
        return _NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict | list) and not depth_left:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        return {
            to_storable(key): to_storable(member, depth_left - 1) for key, member in value.items()
        }
    if isinstance(value, list):
        return [to_storable(member, depth_left - 1) for member in value]
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if (isinstance(value, float) and not math.isfinite(value)) or (
        is_int and not -(2**63) <= value < 2**63
    ):
        return str(value)
    return value
