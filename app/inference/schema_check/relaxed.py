"""Schemas as the validator reads them: the keywords that all engines read alike, and alternatives without errors of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.inference.schema_check.patterns import portable

# Members whose values hold no schemas.
PLAIN = frozenset((
    "type", "enum", "const", "required", "dependentRequired", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
))  # fmt: skip
_ONE = frozenset(("items", "additionalItems", "propertyNames"))
_LISTS = frozenset(("allOf", "prefixItems"))
_BY_NAME = frozenset(("properties", "$defs", "definitions"))
_ALTERNATIVES = ("anyOf", "oneOf")
_NULL = {"type": "null"}
# Each bounds the time of compiling, in which the validator holds the interpreter's lock, to some 10 ms.
_MAX_PATTERNS = 64
_MAX_STATES = 8_000  # of all patterns
_MAX_PARTS = 1_000


@dataclass(slots=True)
class Relaxed:
    """`schema` accepts each value that the original accepts.

    `states` are those of the patterns by their new text. `names` are of properties: parts of the request, and not of an answer.
    """

    schema: Any = True
    states: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    _parts: int = 0

    @classmethod
    def of(cls, schema: Any) -> "Relaxed":
        """Raises ValueError for a schema of too many parts."""
        made = cls()
        made.schema = made._part(schema)
        return made

    def _part(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise ValueError("too many parts")
        kept: dict[str, Any] = {}
        for name, member in part.items():
            if name in PLAIN:
                kept[name] = member
            elif name in _ONE:
                kept[name] = self._list(member) if isinstance(member, list) else self._part(member)
            elif name in _LISTS:
                kept[name] = self._list(member)
            elif name in _BY_NAME:
                kept[name] = {key: self._part(one) for key, one in member.items()}
                self.names.update(member if name == "properties" else ())
        kept |= self._rest(part)
        alternatives = [self._either(part[name]) for name in _ALTERNATIVES if name in part]
        if alternatives:
            kept["allOf"] = kept.get("allOf", []) + alternatives
        return kept

    def _list(self, parts: list[Any]) -> list[Any]:
        return [self._part(one) for one in parts]

    def _rest(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """The members that are left out if they cannot be checked."""
        kept: dict[str, Any] = {}
        place = part.get("$ref")
        if isinstance(place, str) and place.startswith("#"):
            kept["$ref"] = place
        if (pattern := self._pattern(part.get("pattern"))) is not None:
            kept["pattern"] = pattern
        named = part.get("patternProperties", {})
        patterns = {key: self._pattern(key) for key in named}
        if None in patterns.values():
            return kept  # it is not known what `additionalProperties` are
        if named:
            kept["patternProperties"] = {
                text: self._part(named[key]) for key, text in patterns.items()
            }
        if "additionalProperties" in part:
            kept["additionalProperties"] = self._part(part["additionalProperties"])
        return kept

    def _pattern(self, pattern: Any) -> str | None:
        if not isinstance(pattern, str) or len(self.states) >= _MAX_PATTERNS:
            return None
        found = portable(pattern)
        if found is None or sum(self.states.values()) + found.states > _MAX_STATES:
            return None
        self.states[found.text] = found.states
        return found.text

    def _either(self, parts: list[Any]) -> dict[str, Any]:
        """Alternatives, of which several may fit (llguidance joins those of `oneOf`).

        Not as `anyOf`: the validator keeps the errors of each alternative, and theirs, which is exponential. A member that
        may be null has the error of its only other alternative.
        """
        alternatives = self._list(parts)
        others = [one for one in alternatives if one != _NULL]
        if len(others) == 1 and len(alternatives) == 2:
            return {"if": _NULL, "else": others[0]}
        return {"not": {"allOf": [{"not": one} for one in alternatives]}}
