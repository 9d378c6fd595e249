"""Rows as the input of a statement: one declaration gives the SQL and its arguments.

Each column is sent as an array and zipped by `unnest`. JSON is sent as text and cast in PostgreSQL.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class RecordSet(Generic[T]):
    """Columns by name with their SQL types.

    A column's value is the attribute of its name, or what `computed` makes of the row.
    """

    def __init__(
        self, types: Mapping[str, str], computed: Mapping[str, Callable[[T], object]] | None = None
    ) -> None:
        self.types = types
        self._computed = computed or {}
        self._getters: dict[str, Callable[[T], Any]] = {
            name: self._computed.get(name) or attrgetter(name) for name in types
        }

    def __len__(self) -> int:
        return len(self.types)

    def extended(
        self, types: Mapping[str, str], computed: Mapping[str, Callable[[T], object]]
    ) -> "RecordSet[T]":
        """Return these columns and further ones."""
        return RecordSet({**self.types, **types}, {**self._computed, **computed})

    def select(self, first: int) -> str:
        """Return a SELECT of the rows from the parameters $first and following."""
        columns = [
            f"{name}::jsonb" if type_ == "jsonb" else name for name, type_ in self.types.items()
        ]
        arrays = [
            f"${number}::{'text' if type_ == 'jsonb' else type_}[]"
            for number, type_ in enumerate(self.types.values(), first)
        ]
        return (
            f"SELECT {', '.join(columns)} FROM unnest({', '.join(arrays)})"
            f" AS i({', '.join(self.types)})"
        )

    def arguments(self, rows: Iterable[T], **given: Sequence[object]) -> list[Sequence[object]]:
        """Return the array of each column; `given` are columns that are not part of a row."""
        rows = list(rows)
        return [
            given[name] if name in given else [get(row) for row in rows]
            for name, get in self._getters.items()
        ]
