"""The inputs of statements: each member has a column of its table, of the same type."""

from dataclasses import dataclass

import pytest
from sqlalchemy import Table
from sqlalchemy.dialects import postgresql

from app.core.ids import new_id
from app.core.record_set import Json, RecordSet
from app.core.tables.results import contexts, result_chunks, results
from app.queue import enqueue, progress
from app.queue.enqueue import NewContext, NewResult
from app.queue.idempotency import NewKey

# PostgreSQL casts an integer to these when it stores it.
TYPES = {
    "int": {"INTEGER", "SMALLINT", "BIGINT"},
    "bool": {"BOOLEAN"},
    "float8": {"FLOAT"},
    "text": {"VARCHAR", "TEXT"},
    "jsonb": {"JSONB", "TEXT"},
}


@pytest.mark.parametrize(
    ("table", "types"),
    [
        (contexts, enqueue.CONTEXTS.types),
        (results, RecordSet(NewResult, enqueue._UNSTORED).types),
        (result_chunks, progress._CHUNKS.types),
    ],
)
def test_every_member_is_a_column_of_its_type(table: Table, types: dict[str, str]) -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for name, type_ in types.items():
        stored = table.columns[name].type.compile(dialect)
        assert stored in TYPES.get(type_, {type_.upper()}), name


def test_a_member_that_is_no_column_is_named() -> None:
    with pytest.raises(KeyError):
        RecordSet(NewResult)


def test_values_stand_in_the_columns_order() -> None:
    context = NewContext(new_id(), "team", "text", None, "{}")
    result = NewResult(
        *(new_id(), "team", context.id, "m", "{}", 9.0),
        priority=3,
        new_context=context,
        key=NewKey("k", b"hash", 5.0),
    )
    columns = enqueue._KEYED_RESULTS
    values = columns.arguments([result, result], may_start=[True, False])
    by_name = dict(zip(columns.types, values, strict=True))
    assert by_name["id"] == [result.id, result.id]
    assert (by_name["priority"], by_name["key_seconds"]) == ([3, 3], [5.0, 5.0])
    assert (by_name["step"], by_name["may_start"]) == ([1.0, 1.0], [True, False])


def test_the_statement_numbers_its_parameters() -> None:
    @dataclass
    class Row:
        id: int
        metadata: Json | None

    assert RecordSet(Row, (), {"b": ("bool", bool)}).select(3) == (
        'SELECT "id", "metadata"::jsonb, "b" FROM unnest($3::int[], $4::text[], $5::bool[])'
        ' AS i("id", "metadata", "b")'
    )
