"""The check of texts against JSON schemas: what fails, what never does, and the bounds of its time."""

import json
import time
from typing import Any

import pytest

from app.inference.schema_check import Fault, check, compiled
from app.inference.schema_check.cost import Cost
from app.inference.schema_check.patterns import portable
from app.inference.schema_check.relaxed import Relaxed

NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"a/b": {"type": "integer", "minimum": 3}, "list": {"type": "array", "items": {"enum": ["x"]}}},
    "required": ["a/b"],
    "additionalProperties": {"type": "null"},
}  # fmt: skip
UNION = {"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]}


def fault_of(schema: Any, text: str) -> Fault | None:
    found = compiled(schema)
    return None if found is None else found.fault_of(text)


@pytest.mark.parametrize(
    ("schema", "text", "reason", "place"),
    [
        (NAMED, "", "no JSON at character 1", ""),
        (NAMED, '{"a/b": 4} and more', "no JSON at character 12", ""),
        (NAMED, '{"a/b": NaN}', "no JSON", ""),
        (NAMED, "[]", "`type`", ""),
        (NAMED, "{}", "`required`", ""),
        (NAMED, '{"a/b": 2}', "`minimum`", "/a~1b"),
        (NAMED, '{"a/b": 3, "list": ["x", "y"]}', "`enum`", "/list/1"),
        (NAMED, '{"a/b": 3, "secret": 1}', "`type`", "/*"),
        (NAMED | {"additionalProperties": False}, '{"a/b": 3, "c": 1}', "`additionalProperties`", ""),
        ({"properties": {"a": False}}, '{"a": 1}', "allows no value", "/a"),
        ({"properties": {"a": UNION}}, '{"a": "x"}', "none of the alternatives", "/a"),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, "3", "none of the alternatives", ""),
        ({"anyOf": [{"properties": {"a": {"maxLength": 1}}}, {"type": "null"}]}, '{"a": "xy"}', "`maxLength`", "/a"),
        ({"$defs": {"a/b c": {"const": 7}}, "$ref": "#/$defs/a~1b%20c"}, "8", "`const`", ""),
        ({"properties": {"next": {"$ref": "#"}}, "type": "object"}, '{"next": {"next": 1}}', "`type`", "/next/next"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True},
         "3", "exclusiveMinimum", ""),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "1.00000000000000000000", "`exclusiveMaximum`", ""),
        ({"pattern": r"^\d{2}-\w+$"}, '"1-a"', "`pattern`", ""),
        ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, '{"b": 1}',
         "`additionalProperties`", ""),
        ({"items": {"type": "integer"}}, "[" + "1," * 5_000 + "null]", "`type`", "/5000"),
    ],
)  # fmt: skip
def test_a_text_that_does_not_follow_its_schema(
    schema: Any, text: str, reason: str, place: str
) -> None:
    fault = fault_of(schema, text)
    assert fault is not None
    assert reason in fault.reason
    assert (fault.place, fault.is_json) == (place, "no JSON" not in fault.reason)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (NAMED, ' {"a/b": 3, "list": [], "c": null}\n'),
        ({"oneOf": [{"enum": ["a"]}, {"type": "string"}]}, '"a"'),  # engines join alternatives
        ({"multipleOf": 0.1}, "0.30000000000000000000"),
        ({"exclusiveMaximum": 1}, "0.99999999999999999999"),
        ({"type": "integer", "multipleOf": 3}, "1" + "0" * 40 + "2"),
        ({"type": "integer"}, "1" * 9_000),
        ({"maximum": 5}, "1e999"),
        ({"maxLength": 1}, '"\\ud800\\ud800"'),
        # Other dialects of regular expressions, and other readings of keywords.
        ({"pattern": r"^\d\w\s.$"}, '"٣é\\u0085\\n"'),
        ({"pattern": r"^[\d-]+[^\W]$"}, '"٣-é"'),
        ({"pattern": r"^\p{L}$"}, '"1"'),
        ({"pattern": "^(?i)yes$"}, '"YES"'),
        ({"pattern": "(?<=a)b"}, '"x"'),
        ({"pattern": "["}, '"x"'),
        ({"pattern": "(a{1,4000}){1,4000}"}, '"x"'),
        ({"patternProperties": {r"\p{L}": {}}, "additionalProperties": False}, '{"x": 1}'),
        ({"format": "date"}, '"x"'),
        ({"not": {"pattern": "(?i)a"}}, '"x"'),
        ({"unevaluatedProperties": False, "anyOf": [{"properties": {"a": {}}}]}, '{"a": 1}'),
        # Schemas that cannot be read, and references to other documents.
        ({"$ref": "https://example.com/schema"}, "1"),
        ({"$ref": "#/$defs/nothing"}, "1"),
        ({"$ref": "#/anyOf/0", "anyOf": [{"type": "null"}, {"const": 2}]}, "3"),
        ({"multipleOf": 0}, "1"),
        ({"items": [{"type": "null"}]}, "[1]"),
        ({"$ref": "#"}, "1"),
        (True, "1"),
    ],
)
def test_a_text_that_may_follow_its_schema_does_not_fail(schema: Any, text: str) -> None:
    assert fault_of(schema, text) is None


def doubled(keyword: str) -> Any:
    definitions = {f"a{n}": {keyword: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    return {"$defs": definitions | {"a40": {"type": "null"}}, "$ref": "#/$defs/a0"}


EXPRESSION = {
    "$defs": {"e": {"anyOf": [{"properties": {"left": {"$ref": "#/$defs/e"}, "op": {"const": n}}} for n in range(6)]}},
    "$ref": "#/$defs/e",
}  # fmt: skip
CHAIN = {
    "$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(2_000)} | {"a2000": {"type": "null"}},
    "$ref": "#/$defs/a0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (doubled("allOf"), "1"),
        (doubled("anyOf"), "1"),
        (EXPRESSION, '{"op": 9, "left":' * 30 + "1" + "}" * 30),
        (CHAIN, "1"),
        ({"items": {"$ref": "#"}, "type": "array"}, "[" * 500 + "]" * 500),
        ({"items": {"$ref": "#"}}, "[" * 100_000),
        ({"items": {"enum": [{"a": n} for n in range(3_000)]}}, f"[{'1,' * 3_000}1]"),
        ({"allOf": [{"pattern": "(a|b)*a(a|b){100}c"}] * 50}, f'"{"ab" * 20_000}"'),
        ({"type": "null"}, " " * 250_001),
        ({"allOf": [{}] * 20_000 + [{"type": "null"}]}, "1"),
    ],
    ids=[
        "allOf",
        "anyOf",
        "expression",
        "chain",
        "deep",
        "deeper",
        "enum",
        "pattern",
        "long",
        "parts",
    ],
)
def test_a_check_that_would_take_long_is_left_out(schema: Any, text: str) -> None:
    compiled(schema)
    began = time.thread_time()
    assert fault_of(schema, text) is None
    assert time.thread_time() - began < 1


def test_a_long_list_of_choices_is_checked() -> None:
    choices = [f"choice {n}" for n in range(3_000)]
    fault = fault_of({"items": {"enum": choices}}, json.dumps([*choices[:500], "other"]))
    assert fault == Fault("it does not follow `enum`", "/500")


def test_an_expression_is_checked_as_long_as_it_is_small() -> None:
    fault = fault_of(EXPRESSION, '{"op": 0, "left": {"op": 9}}')
    assert fault == Fault("it fits none of the alternatives (`anyOf`, `oneOf`)", "")


def test_the_cost_counts_each_way_to_a_part() -> None:
    part: dict[str, Any] = {"properties": {"a": {"$ref": "#"}, "b": {}}, "items": {"type": "null"}}
    cost = Cost(part, {})
    values = (1, {"a": 1}, {"a": {"a": 1}}, {"a": {"a": 1, "b": 1}})
    assert [cost.of(value, 10**9) for value in values] == [4, 10, 16, 22]
    assert cost.of({"a": 1}, 9) > 9
    twice = {"allOf": [part, part]}
    assert Cost(twice, {}).of(1, 10**9) == 2 + 2 * 4
    assert Cost({"patternProperties": {"^ab": {"pattern": "c"}}}, {"^ab": 16, "c": 5}).of(
        {"abc": "cc"}, 10**9
    ) == 2 + (1 + 2) + (3 + 2) * (4 + 2)


@pytest.mark.parametrize(
    ("pattern", "text", "states"),
    [
        ("^a(?:b|c){2,3}$", "^a(?:b|c){2,3}$", 16),
        (r"\/\n\x41\u00e9", "/\\nAé", 5),
        (".", r"[\s\S]", 2),
        (r"\D[^\d]", "[^0-9][^0-9]", 3),
        ("a{", None, 0),
        ("(a", None, 0),
        ("a)", None, 0),
        ("*", None, 0),
        (r"\bword", None, 0),
        (r"(a)\1", None, 0),
        ("[a&&b]", None, 0),
        ("[a[b]", None, 0),
        (r"[\S]", None, 0),
        ("(?=a)", None, 0),
        ("(a{99}){99}", None, 0),
    ],
)
def test_portable_patterns(pattern: str, text: str | None, states: int) -> None:
    found = portable(pattern)
    assert (found and found.text) == text
    assert found is None or found.states == states


def test_not_more_patterns_are_compiled_than_a_bound() -> None:
    relaxed = Relaxed.of({"anyOf": [{"pattern": f"a{n}"} for n in range(100)]})
    assert len(relaxed.states) == 64
    long = Relaxed.of({"anyOf": [{"pattern": f"a{{999}}{n}"} for n in range(9)]})
    assert 7_000 < sum(long.states.values()) <= 8_000


def test_checks_are_kept_within_a_bound() -> None:
    many = [{"enum": [str(n), "x" * 60_000]} for n in range(20)]
    for schema in many:
        compiled(schema)
    assert [check.is_compiled(schema) for schema in (many[0], many[-1])] == [False, True]
    assert sum(map(len, check._checks)) == check._cached_bytes <= check._MAX_CACHED_BYTES
    assert compiled(many[-1]) is compiled(dict(many[-1]))
