"""The inputs of statements: no member is forgotten, and each has the type of its column."""

from dataclasses import fields
from typing import Any

import pytest
from sqlalchemy import Table
from sqlalchemy.dialects import postgresql

from app.core.ids import new_id
from app.core.record_set import RecordSet
from app.core.tables.results import contexts, result_chunks, results
from app.queue import enqueue, finish, progress
from app.queue.enqueue import NewContext, NewResult
from app.queue.finish import AttemptEnd
from app.queue.idempotency import NewKey
from app.queue.progress import Chunk

# Members of a row that are no columns of its statement, by the columns that stand for them.
SPLIT = {
    "new_context": {"has_new_context"},
    "key": {"key", "request_hash", "key_seconds"},
    "limits": {"step"},
    "failure": {"error_code", "error_message", "error_retryable"},
    "goes_with_key": set[str](),  # these concern this process alone
    "tokens": set[str](),
    "has_attribution": set[str](),
}
ALIASES = {"int": "INTEGER", "bool": "BOOLEAN", "float8": "FLOAT", "text": "VARCHAR"}


@pytest.mark.parametrize(
    ("row", "columns", "given"),
    [
        (NewContext, enqueue._CONTEXTS, set()),
        (NewResult, enqueue._KEYED_RESULTS, {"may_start"}),
        (Chunk, progress._CHUNKS, set()),
        (AttemptEnd, finish._ENDS, set()),
    ],
)
def test_every_member_is_sent(row: Any, columns: RecordSet[Any], given: set[str]) -> None:
    expected = set(given)
    for field in fields(row):
        expected |= SPLIT.get(field.name, {field.name})
    assert {name.strip('"') for name in columns.types} == expected


@pytest.mark.parametrize(
    ("table", "types"),
    [
        (contexts, enqueue._CONTEXTS.types),
        (results, enqueue._STORED),
        (result_chunks, progress._CHUNKS.types),
    ],
)
def test_every_column_is_stored_by_its_type(table: Table, types: dict[str, str]) -> None:
    for name, type_ in types.items():
        dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
        stored = table.columns[name.strip('"')].type.compile(dialect).replace("TEXT", "VARCHAR")
        assert stored == ALIASES.get(type_, type_.upper()), name


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
    columns = RecordSet[NewContext]({"id": "uuid", "metadata": "jsonb"})
    assert columns.select(3) == (
        "SELECT id, metadata::jsonb FROM unnest($3::uuid[], $4::text[]) AS i(id, metadata)"
    )
