"""The inputs of statements: each member has a column of its table, of the same type."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def new_result(**members: Any) -> NewResult:
    context = NewContext(new_id(), "team", "text", None, "{}")
    return NewResult(
        *(new_id(), "team", context.id, "m", "{}", 9.0), **{"new_context": context, **members}
    )


def test_values_stand_in_the_columns_order() -> None:
    result = new_result(key=NewKey("k", b"hash", 5.0))
    columns = enqueue._results(keys=True, jobs=True, reuses=True)
    values = columns.arguments([result, result], may_start=[True, False])
    by_name = dict(zip(columns.types, values, strict=True))
    assert by_name["id"] == [result.id, result.id]
    assert (by_name["key_seconds"], by_name["may_start"]) == ([5.0, 5.0], [True, False])


def test_values_that_results_share_are_sent_once() -> None:
    """Each result names its form and its flow, the model's queue in which it stands."""
    first, urgent, again = new_result(), new_result(priority=3), new_result()
    _, arguments = enqueue.to_statement([first, urgent, again], [False, True, False], None)
    contexts, forms, flows = (
        list(one.types) for one in (enqueue.CONTEXTS, enqueue._FORMS, enqueue._FLOWS)
    )
    names = (
        *contexts,
        *enqueue._results(keys=False, jobs=False, reuses=False).types,
        *forms,
        *flows,
    )
    assert all(isinstance(column, Sequence) for column in arguments)
    columns = [(name, list(column)) for name, column in zip(names, arguments[:-1], strict=True)]  # type: ignore[call-overload]
    results = dict(
        columns[len(contexts) :][
            : len(enqueue._results(keys=False, jobs=False, reuses=False).types)
        ]
    )
    assert results["id"] == [first.id, urgent.id, again.id]
    assert (results["form"], results["flow"]) == ([1, 2, 1], [1, 2, 1])
    assert dict(columns[-len(flows) - len(forms) : -len(flows)])["priority"] == [0, 3]
    of_flows = dict(columns[-len(flows) :])
    assert of_flows["priority"] == [0, 3]
    assert of_flows["may_start"] == [False, True]


def test_the_statement_numbers_its_parameters() -> None:
    @dataclass
    class Row:
        id: int
        metadata: Json | None

    rows = RecordSet(Row, (), {"b": ("bool", bool)})
    assert rows.select(3) == (
        'SELECT "id", "metadata"::jsonb, "b" FROM unnest($3::int[], $4::text[], $5::bool[])'
        ' AS i("id", "metadata", "b")'
    )
    assert rows.select(3, is_one=True) == (
        'SELECT $3::int AS "id", $4::jsonb AS "metadata", $5::bool AS "b"'
    )
    assert rows.columns(3, "i.p") == (
        '($3::int[])[i.p] AS "id", ($4::jsonb[])[i.p] AS "metadata", ($5::bool[])[i.p] AS "b"'
    )
    assert rows.arguments_of_one(Row(1, None)) == [1, None, True]
