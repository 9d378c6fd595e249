"""Values of arguments that a model writes as plain text: the tool's schema has their types."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_DEPTH = 8  # of alternatives in a schema
_INTEGER = re.compile(r"[+-]?\d{1,1000}")
_NUMBER = re.compile(r"[+-]?(?:\d{1,1000}\.?\d{0,1000}|\.\d{1,1000})(?:[eE][+-]?\d{1,4})?")


def typed_value(text: str, schema: Mapping[str, Any], name: str) -> Any:
    """The value of one argument; its text if the schema has no such argument, or only texts.

    A text of none of the types is the value that it is in JSON, if it is one.
    """
    properties = schema.get("properties")
    member = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(member, dict):
        return text
    types = set(_types_of(member))
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return None
    if "integer" in types and _INTEGER.fullmatch(bare):
        return int(bare)
    if "number" in types and _NUMBER.fullmatch(bare):
        return _number(bare)
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if "string" in types and not types & {"object", "array"}:
        return text
    return _json(bare, text)


def _types_of(schema: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    given = schema.get("type", [])
    yield from (
        one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)
    )
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        if isinstance(members, list) and depth < _MAX_DEPTH:
            for member in members:
                if isinstance(member, dict):
                    yield from _types_of(member, depth + 1)


def _number(text: str) -> float | int | str:
    value = float(text)
    if not math.isfinite(value):  # JSON has no such number
        return text
    return int(value) if value == int(value) else value


def _json(text: str, otherwise: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return otherwise
    return value
