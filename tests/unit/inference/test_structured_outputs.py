"""Constraints of a text: one kind, and JSON schemas whose parts are schemas."""

from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter, ValidationError

from app.inference.structured_outputs import MAX_SCHEMA_BYTES, StructuredOutputs

_ADAPTER: TypeAdapter[Any] = TypeAdapter(StructuredOutputs)


def accepted(**members: Any) -> bool:
    try:
        _ADAPTER.validate_python(members)
    except ValidationError:
        return False
    return True


def refusal(**members: Any) -> str:
    with pytest.raises(ValidationError) as raised:
        _ADAPTER.validate_python(members)
    (error,) = raised.value.errors()
    return error["msg"]


@pytest.mark.parametrize(
    "members",
    [
        {"json": {}}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": "root ::= x"},
        {"json_object": True},
    ],
)  # fmt: skip
def test_one_constraint_is_given(members: dict[str, Any]) -> None:
    assert _ADAPTER.validate_python(members) == members
    other = {"regex": "b"} if "regex" not in members else {"grammar": "x"}
    assert "exactly one" in refusal(**members | other)


def test_no_constraint_is_refused() -> None:
    assert "exactly one" in refusal()
    assert "can only be true" in refusal(json_object=False)
    assert not accepted(unknown=1)


def test_a_schema_may_be_its_text() -> None:
    text = orjson.dumps({"type": "object"}).decode()
    assert _ADAPTER.validate_python({"json": text}) == {"json": {"type": "object"}}
    assert "is no JSON" in refusal(json="{")


@pytest.mark.parametrize(
    "schema",
    [
        True, {"type": "string"}, {"type": ["string", "null"]}, {"properties": {}},
        {"properties": {"type": {"type": "integer"}, "items": {}}}, {"items": True},
        {"anyOf": [{"type": "number"}]}, {"enum": ["no schema", 1], "const": []},
        {"$defs": {"a": {"not": {"type": "null"}}}}, {"x-items": 1},
    ],
)  # fmt: skip
def test_schemas_are_accepted(schema: Any) -> None:
    assert accepted(json=schema)


@pytest.mark.parametrize("name", ["additionalProperties", "items", "not", "contains", "if", "else"])
def test_a_member_that_holds_a_schema_is_checked(name: str) -> None:
    assert accepted(json={name: {"type": "string"}})
    assert f"`{name}` in the schema is no JSON schema" in refusal(json={name: 1})
    assert f"`{name}` in the schema has an unknown type 'text'" in refusal(
        json={name: {"type": "text"}}
    )


@pytest.mark.parametrize("name", ["anyOf", "oneOf", "allOf", "prefixItems"])
def test_a_member_that_holds_a_list_of_schemas_is_checked(name: str) -> None:
    assert accepted(json={name: [{"type": "string"}, True]})
    wrong: Any
    for wrong in ([], {}, {"type": "string"}, "x"):
        assert "must be a list of schemas" in refusal(json={name: wrong})
    assert f"`{name}` in the schema is no JSON schema" in refusal(json={name: [{}, 1]})


@pytest.mark.parametrize("name", ["properties", "patternProperties", "$defs", "definitions"])
def test_a_member_that_holds_schemas_by_name_is_checked(name: str) -> None:
    assert accepted(json={name: {"type": {"type": "string"}}})
    wrong: Any
    for wrong in ([], [{}], "x"):
        assert "must be an object of schemas" in refusal(json={name: wrong})
    assert f"`{name}` in the schema is no JSON schema" in refusal(json={name: {"a": {}, "b": 1}})


@pytest.mark.parametrize("types", ["text", ["string", "text"], [1], 1, [["string"]]])
def test_types_are_those_of_json(types: Any) -> None:
    assert "has an unknown type" in refusal(json={"type": types})


def test_a_schema_has_a_bounded_size() -> None:
    assert not accepted(json={"description": "x" * MAX_SCHEMA_BYTES})
    deep: Any = {}
    for _ in range(60):
        deep = {"items": deep}
    assert not accepted(json=deep)


EITHER = {"anyOf": [{"properties": {"a": True}}, {"properties": {"b": True}}]}
CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1_000)}


@pytest.mark.parametrize(
    ("schema", "is_accepted"),
    [
        ({"allOf": [EITHER] * 8}, True),
        ({"allOf": [EITHER] * 9}, False),
        ({"allOf": [{"allOf": [EITHER] * 3}] * 3}, False),
        ({"anyOf": [EITHER] * 300}, True),
        ({"properties": {f"p{i}": {"allOf": [{"type": "null"}]} for i in range(1_000)}}, True),
        ({"properties": {f"p{i}": {"allOf": [EITHER] * 4} for i in range(16)}}, True),
        ({"properties": {f"p{i}": {"allOf": [EITHER] * 4} for i in range(17)}}, False),
        ({"$defs": {"a/b": EITHER}, "allOf": [{"$ref": "#/$defs/a~1b"}] * 9}, False),
        ({"x a": [0, {"oneOf": [True, False]}], "allOf": [{"$ref": "#/x%20a/1"}] * 9}, False),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, EITHER]}}, "$ref": "#/$defs/a"}, True),
        ({"allOf": [{"$ref": "#/nowhere"}, {"$ref": "other.json"}, {"$ref": "#/allOf/x/9"}]}, True),
        ({"$defs": CHAIN | {"d1000": {}}, "$ref": "#/$defs/d0"}, False),
    ],
)  # fmt: skip
def test_alternatives_that_engines_multiply_out_are_bounded(
    schema: dict[str, Any], is_accepted: bool
) -> None:
    if is_accepted:
        assert accepted(json=schema)
    else:
        assert "combinations of alternatives" in refusal(json=schema)
