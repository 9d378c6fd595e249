"""Structured outputs: constraints of a generated text. The names are vLLM's
(https://docs.vllm.ai/en/latest/features/structured_outputs/)."""

import math
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import unquote

import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    with_config,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.core.bounded_json import check_json

MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_DEPTH = 48
MAX_COMBINATIONS = 256
"""Engines multiply out the alternatives in the members of each `allOf`; all of a schema together."""
MAX_GRAMMAR_CHARACTERS = 8_192
"""Engines rewrite EBNF in a time that is quadratic in the number of its rules."""

_VERY_MANY = 10**9
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
# Members of a schema that hold schemas: one, a list, or several by name.
_ONE = {"additionalProperties", "items", "not", "propertyNames", "contains", "if", "then", "else"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_ONLY_ONE = ("json", "regex", "choice", "grammar", "json_object")


def check_schema(schema: Any) -> Any:
    """Check the size of a JSON schema, and that its parts are schemas.

    The engine checks the rest before it accepts the request.
    """
    check_json(schema, max_bytes=MAX_SCHEMA_BYTES, max_depth=MAX_SCHEMA_DEPTH)
    _check_part(schema, "the schema")
    if (count := Combinations(schema).count) > MAX_COMBINATIONS:
        raise _wrong(
            f"the schema has {count:,} combinations of alternatives in `allOf`; it may have {MAX_COMBINATIONS}"
        )
    return schema


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, bool):
        return
    if not isinstance(part, dict):
        raise _wrong(f"{where} is no JSON schema: it must be an object")
    types = part.get("type", [])
    for one in types if isinstance(types, list) else [types]:
        if not isinstance(one, str) or one not in _TYPES:
            raise _wrong(f"{where} has an unknown type {str(one)[:40]!r}")
    for name, member in part.items():
        for inner in _schemas_of(name, member, where):
            _check_part(inner, f"`{name[:40]}` in {where[:80]}")


def _schemas_of(name: str, member: Any, where: str) -> Iterable[Any]:
    if name in _ONE:
        return [member]
    if name in _LISTS:
        if not isinstance(member, list) or not member:
            raise _wrong(f"`{name}` in {where} must be a list of schemas")
        return member
    if name in _BY_NAME:
        if not isinstance(member, dict):
            raise _wrong(f"`{name}` in {where} must be an object of schemas")
        return member.values()
    return ()


class Combinations:
    """Counts the alternatives that each `allOf` of a schema has once it is multiplied out."""

    def __init__(self, schema: Any) -> None:
        self.count = 0
        self._schema = schema
        self._depth = 0  # of references that lead to references
        self._of_places: dict[str, int] = {}  # the alternatives of those that a `$ref` names
        self._walk(schema)

    def _walk(self, part: Any) -> None:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for one in inner:
            self._walk(one)
        if isinstance(part, dict) and isinstance(part.get("allOf"), list):
            alternatives = self._alternatives(part)
            self.count += alternatives if alternatives > 1 else 0

    def _alternatives(self, part: Any) -> int:
        if not isinstance(part, dict):
            return 1
        count = 1
        for name in ("anyOf", "oneOf"):
            if isinstance(part.get(name), list):
                count *= sum(self._alternatives(one) for one in part[name])
        if isinstance(part.get("allOf"), list):
            count *= math.prod(self._alternatives(one) for one in part["allOf"])
        if isinstance(part.get("$ref"), str):
            count *= self._at(part["$ref"])
        return min(count, _VERY_MANY)

    def _at(self, place: str) -> int:
        if place in self._of_places:
            return self._of_places[place]
        if self._depth >= MAX_SCHEMA_DEPTH:
            return _VERY_MANY
        self._depth += 1
        self._of_places[place] = 1  # for a circle
        self._of_places[place] = self._alternatives(find_part(self._schema, place))
        self._depth -= 1
        return self._of_places[place]


def find_part(schema: Any, place: str) -> Any:
    """The part of a schema at a local reference (RFC 6901); None if there is none."""
    for name in unquote(place.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict):
            schema = schema.get(name)
        else:
            return None
    return schema


def _wrong(message: str) -> PydanticCustomError:
    # The message may hold braces, which would be fields of a template.
    return PydanticCustomError("wrong_schema", "{message}", {"message": message})


def read_schema_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise _wrong(f"is no JSON: {error}") from None


JsonSchema = Annotated[
    JsonValue,
    AfterValidator(check_schema),
    BeforeValidator(read_schema_text),
    WithJsonSchema({"type": "object", "description": "A JSON schema, or its JSON text."}),
]
_Text = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_BYTES)]
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1000)
]


@with_config(ConfigDict(extra="forbid", strict=True))
class _Members(TypedDict, total=False):
    json: JsonSchema
    regex: _Text
    choice: _Choices
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
    json_object: bool


def _only_one(value: _Members) -> _Members:
    given = [name for name in _ONLY_ONE if name in value]
    if len(given) != 1:
        raise _wrong(f"give exactly one of {', '.join(_ONLY_ONE)}")
    if value.get("json_object") is False:
        raise _wrong("json_object can only be true")
    return value


StructuredOutputs = Annotated[_Members, AfterValidator(_only_one)]
