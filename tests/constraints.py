"""Constraints of a text, and what the vLLM backend of `triton/` does with them.

The end-to-end test sends each to a real engine; docs/sampling.md has the same rows.
"""

import json
from typing import Any

# A constraint, and a part of the refusal.
NOT_ENFORCED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"not": {"type": "null"}}}, "not"),
    ({"json": {"if": {"type": "null"}, "then": {"const": None}}}, "if"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "array", "contains": {"const": 1}}}, "contains"),
    ({"json": {"type": "object", "propertyNames": {"pattern": "^a"}}}, "propertyNames"),
    ({"json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
    ({"json": {"type": "object", "dependentSchemas": {"a": {}}}}, "dependentSchemas"),
    ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
    ({"json": {"type": "string", "format": "colour"}}, "Unknown format"),
    ({"json": {"$ref": "https://example.com/schema"}}, "https://example.com/schema"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
    ({"json": {"type": "string", "pattern": "(?<=a)b"}}, "look-behind"),
    ({"json": {"type": "string", "pattern": r"(a)\1"}}, "backreferences"),
    ({"regex": r"\bword"}, "lookarounds"),
    ({"grammar": "root ::= root root"}, "LLM_EBNF_GRAMMARS"),
]

_YES = [a + b + c for a in "yY" for b in "eE" for c in "sS"]
# A schema, and all values that follow it.
ENFORCED: list[tuple[dict[str, Any], list[Any]]] = [
    ({"enum": [1, "a", {"b": []}]}, [1, "a", {"b": []}]),
    ({"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}]}, ["a", "b"]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, [3, 4, 5]),
    ({"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0, "maximum": 20}, [7, 14]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2, "maxItems": 3},
     [[1, 2], [1, 2, 2]]),
    ({"allOf": [{"required": ["a"]}], "properties": {"a": {"enum": ["x"]}}, "additionalProperties": False,
      "type": "object"}, [{"a": "x"}]),
    ({"type": "object", "patternProperties": {"^ab$": {"const": 1}}, "additionalProperties": False, "maxProperties": 1},
     [{}, {"ab": 1}]),
    ({"$defs": {"a/b c": {"const": 7}}, "$ref": "#/$defs/a~1b%20c"}, [7]),
    ({"type": "string", "pattern": r"^[\p{Lu}&&[A-C]]$"}, ["A", "B", "C"]),
    ({"type": "string", "pattern": "^(?i)yes$"}, _YES),
]  # fmt: skip


def documented() -> list[str]:
    """The rows of the table of docs/sampling.md."""
    rows = [f"| {_code(constraint)} | refused: `{reason}` |" for constraint, reason in NOT_ENFORCED]
    return rows + [f"| {_code({'json': schema})} | enforced |" for schema, _ in ENFORCED]


def _code(constraint: dict[str, Any]) -> str:
    return f"`{json.dumps(constraint)}`"
