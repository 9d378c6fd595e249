"""An upper bound of the time that the check of a value takes, before it begins.

A validator tries a part of a schema again for each way that leads to it: `allOf` with two references to the same
definition, which has two such references itself, and so on, takes 2^n steps.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from app.inference.schema_check.relaxed import PLAIN
from app.inference.structured_outputs import find_part

MAX_DEPTH = 64  # of a value
_MAX_HEIGHT = 256  # of parts that lead to parts of the same value: the validator's stack
_MAX_COUNTED = 20_000  # parts times levels that are counted here
_VERY_MANY = 10**12
_OF_A_CONTAINER = 5  # steps to compare one with another
_SCALARS_OF_A_STEP = 8
_STATES_OF_A_STEP = 4  # of an automaton that reads a character

Children = list[list[Any]]  # of groups: a value is checked by one part of each


class Cost:
    """Counts the steps of a schema on a value of its depth, level by level.

    Raises ValueError if the schema leads to itself without a member or an item between.
    """

    def __init__(self, schema: Any, states: Mapping[str, int]) -> None:
        self._schema = schema
        self._states = states
        self._order: list[Any] = []  # parts behind those that they lead to
        self._heights: dict[int, int] = {}
        self._here: dict[int, list[Any]] = {}
        self._children: dict[int, Children] = {}
        self._visit(schema)
        # Steps of a value, and of each character, by the level below the part.
        self._levels: list[tuple[dict[int, int], dict[int, int]]] = []

    def of(self, value: Any, most: int) -> int:
        """The steps, as far as they are not more than `most`; otherwise a number above it."""
        steps, values, keys = 0, [value], 0
        for level in range(MAX_DEPTH):
            if not values:
                return steps
            if level * len(self._order) > _MAX_COUNTED:
                return _VERY_MANY
            characters = keys + sum(len(one) for one in values if isinstance(one, str))
            of_values, of_characters = self._at(level)
            steps += len(values) * of_values + characters * of_characters
            if steps > most:
                return _VERY_MANY
            objects = [one for one in values if isinstance(one, dict)]
            keys = sum(map(len, chain.from_iterable(objects)))
            values = [*chain.from_iterable(_inner(one) for one in values)]
        return _VERY_MANY

    def _visit(self, root: Any) -> None:
        """Put the parts in order, without recursion over references: there may be thousands."""
        todo = [root]
        while todo:
            part = todo.pop()
            if id(part) in self._heights or not isinstance(part, dict):
                continue
            ways: list[tuple[Any, Iterator[Any]]] = [(part, iter(self._lead(part)))]
            self._heights[id(part)] = _VERY_MANY  # until it is known
            while ways:
                part, others = ways[-1]
                other = next(others, None)
                if other is None:
                    ways.pop()
                    self._settle(part)
                    todo += chain.from_iterable(self._children[id(part)])
                elif id(other) not in self._heights:
                    self._heights[id(other)] = _VERY_MANY
                    ways.append((other, iter(self._lead(other))))
                elif self._heights[id(other)] == _VERY_MANY:
                    raise ValueError("a circle")

    def _lead(self, part: dict[str, Any]) -> list[Any]:
        """The parts for the same value."""
        found = [part[name] for name in ("not", "else") if name in part] + part.get("allOf", [])
        if "$ref" in part:
            found.append(find_part(self._schema, part["$ref"]))
        self._here[id(part)] = found = [one for one in found if isinstance(one, dict)]
        return found

    def _settle(self, part: dict[str, Any]) -> None:
        height = 1 + max((self._heights[id(one)] for one in self._here[id(part)]), default=0)
        if height > _MAX_HEIGHT:
            raise ValueError("too many parts for one value")
        self._heights[id(part)] = height
        self._order.append(part)
        items = part.get("items")
        one_of = [part.get("additionalProperties"), part.get("additionalItems")]
        one_of += items if isinstance(items, list) else [items]
        one_of += [*part.get("properties", {}).values(), *part.get("prefixItems", [])]
        each = [[one] for one in part.get("patternProperties", {}).values()]
        groups = [one_of, *each, [part.get("propertyNames")]]
        self._children[id(part)] = [
            [one for one in group if isinstance(one, dict)] for group in groups
        ]

    def _at(self, level: int) -> tuple[int, int]:
        while len(self._levels) <= level:
            self._levels.append((self._count(self._weight, 0), self._count(self._characters, 1)))
        root = id(self._schema)
        of_values, of_characters = self._levels[level]
        return of_values.get(root, 1), of_characters.get(root, 0)

    def _count(self, own: Callable[[dict[str, Any], int], int], kind: int) -> dict[int, int]:
        above = self._levels[-1][kind] if self._levels else {}
        counts: dict[int, int] = {}
        for part in self._order:
            count = own(part, len(self._levels))
            for group in self._children[id(part)]:
                count += max((above.get(id(one), 0) for one in group), default=0)
            count += sum(counts[id(one)] for one in self._here[id(part)])
            counts[id(part)] = min(count, _VERY_MANY)
        return counts

    def _weight(self, part: dict[str, Any], level: int) -> int:
        """The steps of the part's own keywords on a value, and on a name of its members."""
        if level:
            return len(part.get("patternProperties", ())) if level == 1 else 0
        own = sum(_size(part[name]) for name in part.keys() & PLAIN)
        return 2 + own + len(part.get("properties", ()))

    def _characters(self, part: dict[str, Any], level: int) -> int:
        if level == 1:  # the names of its members
            return sum(map(self._steps, part.get("patternProperties", ())))
        if level or "pattern" not in part:
            return int(not level and ("maxLength" in part or "minLength" in part))
        return self._steps(part["pattern"])

    def _steps(self, pattern: str) -> int:
        return -(-self._states[pattern] // _STATES_OF_A_STEP)


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _size(value: Any) -> int:
    """The steps to compare a value with this one."""
    if not isinstance(value, dict | list):
        return 1
    inner = [*_inner(value)]
    containers = [one for one in inner if isinstance(one, dict | list)]
    scalars = len(inner) - len(containers)
    return _OF_A_CONTAINER + sum(map(_size, containers)) + scalars // _SCALARS_OF_A_STEP
