"""Rows as the input of a statement: a dataclass gives the SQL and its arguments.

Each column is sent as an array and zipped by `unnest`. JSON is sent as text and cast in PostgreSQL.
An array costs PostgreSQL a scan of its own. Values that many rows share are sent once instead, and
picked from their arrays; a single row may be sent as scalars.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

T = TypeVar("T")

Json = Annotated[str, "jsonb"]  # JSON text

_TYPES = {UUID: "uuid", bool: "bool", int: "int", float: "float8", str: "text", bytes: "bytea"}


class RecordSet(Generic[T]):
    """The members of a dataclass as columns, `without` some of them, and `computed` ones.

    A computed column has its SQL type, and what it makes of a row.
    """

    def __init__(
        self,
        row: type[T],
        without: Collection[str] = (),
        computed: Mapping[str, tuple[str, Callable[[T], object]]] | None = None,
    ) -> None:
        hints = get_type_hints(row, include_extras=True)
        stored = [field.name for field in fields(row) if field.name not in without]  # type: ignore[arg-type]
        self.types = {name: _to_sql(hints[name]) for name in stored}
        self._getters: dict[str, Callable[[T], Any]] = {name: attrgetter(name) for name in stored}
        for name, (type_, compute) in (computed or {}).items():
            self.types[name], self._getters[name] = type_, compute

    def select(self, first: int, *, is_one: bool = False) -> str:
        """Return a SELECT of the rows from the parameters $first and following; of one: scalars."""
        if is_one:
            return f"SELECT {self.columns(first, None)}"
        types = self.types.items()
        columns = (f'"{name}"' + "::jsonb" * (type_ == "jsonb") for name, type_ in types)
        arrays = (
            f"${number}::{'text' if type_ == 'jsonb' else type_}[]"
            for number, (_, type_) in enumerate(types, first)
        )
        names = ", ".join(f'"{name}"' for name in self.types)
        return f"SELECT {', '.join(columns)} FROM unnest({', '.join(arrays)}) AS i({names})"

    def columns(self, first: int, place: str | None) -> str:
        """Return columns of the row at `place` in the arrays $first and following; None: of scalars."""
        parameters = enumerate(self.types.items(), first)
        if place is None:
            return ", ".join(
                f'${number}::{type_} AS "{name}"' for number, (name, type_) in parameters
            )
        return ", ".join(
            f'(${number}::{type_}[])[{place}] AS "{name}"' for number, (name, type_) in parameters
        )

    def arguments(self, rows: Iterable[T], **given: Sequence[object]) -> list[Sequence[object]]:
        rows = list(rows)
        return [
            given[name] if name in given else [get(row) for row in rows]
            for name, get in self._getters.items()
        ]

    def arguments_of_one(self, row: T) -> list[object]:
        return [get(row) for get in self._getters.values()]


def _to_sql(hint: Any) -> str:
    """Raises KeyError for a member that cannot be a column."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is Annotated:
        return str(hint.__metadata__[0])
    if get_origin(hint) is Literal:
        return "text"
    return _TYPES[str if issubclass(hint, str) else hint]
