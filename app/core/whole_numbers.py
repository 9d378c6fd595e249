"""Whole numbers of requests: `10.0` is an integer in JSON Schema, and some clients write it."""

from typing import Any

from pydantic import BeforeValidator


def to_whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


# The last of an integer's annotations, so that its bounds are checked after it.
WHOLE = BeforeValidator(to_whole)
