"""Members of a JSON document, read with their bounds: hostile numbers stop here."""

from collections.abc import Mapping
from typing import Any

from app.provisioning.sizing.facts import PlanError

MISSING = object()


class Members:
    """An object of the document. A member that is null counts as absent, as in Hugging Face's files.

    `defaults` are for members that a family leaves out of its files.
    """

    def __init__(
        self, document: object, place: str = "", defaults: Mapping[str, object] | None = None
    ) -> None:
        if not isinstance(document, dict):
            raise PlanError(
                f"{place.rstrip('.') or 'the document'}: must be an object, not {_shown(document)}"
            )
        self._document: dict[str, Any] = document
        self._place = place
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, object]) -> "Members":
        return Members(self._document, self._place, {**defaults, **self._defaults})

    def name_of(self, *names: str) -> str:
        return f"{self._place}{self._first(names)[0]}"

    def has(self, name: str) -> bool:
        return self._document.get(name) is not None

    def names(self, most: int) -> list[str]:
        return list(self._document)[:most]

    def get(self, name: str) -> Any:
        value = self._document.get(name)
        return self._defaults.get(name) if value is None else value

    def inner(self, name: str) -> "Members":
        return Members(self.get(name), f"{self._place}{name}.")

    def number(self, *names: str, high: int, low: int = 1, default: int | None = None) -> int:
        """A whole number from `low` to `high`: the first of the names that is present."""
        name, value = self._first(names)
        if value is MISSING:
            if default is not None:
                return default
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise PlanError(f"{self._place}{names[0]}: missing{others}")
        if type(value) is not int:
            raise PlanError(f"{self._place}{name}: must be a whole number, not {_shown(value)}")
        if not low <= value <= high:
            raise PlanError(
                f"{self._place}{name}: must be from {low} to {high}, not {_shown(value)}"
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanError(f"{self._place}{name}: must be true or false, not {_shown(value)}")
        return value

    def text(self, *names: str, default: str = "") -> str:
        name, value = self._first(names)
        if value is MISSING:
            return default
        if not isinstance(value, str) or len(value) > 200:
            raise PlanError(f"{self._place}{name}: must be a short text, not {_shown(value)}")
        return value

    def texts(self, name: str, length: int) -> list[str] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise PlanError(f"{self._place}{name}: must be a list of {length} texts")
        if not all(isinstance(item, str) for item in value):
            raise PlanError(f"{self._place}{name}: must be a list of texts")
        return value

    def numbers(self, name: str, high: int) -> list[int]:
        """A list of whole numbers from 0 to `high`, at most `high` of them; empty if absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > high:
            raise PlanError(f"{self._place}{name}: must be a list of at most {high} numbers")
        if not all(type(item) is int and 0 <= item <= high for item in value):
            raise PlanError(f"{self._place}{name}: must be a list of numbers from 0 to {high}")
        return value

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for source in (self._document, self._defaults):
            for name in names:
                if source.get(name) is not None:
                    return name, source[name]
        return names[0], MISSING


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
