"""Types of arrays are asked for once per process (app/core/array_types.py)."""

from uuid import UUID

import pytest

from app.core import array_types
from app.core.database import Database
from app.core.settings import Settings

_QUERY = "SELECT $1::uuid[] AS ids, $2::int4[] AS numbers"
_ARGUMENTS = ([UUID(int=1), UUID(int=2)], [3])


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_types, "_known", {})


async def test_a_second_connection_asks_for_no_types(settings: Settings) -> None:
    asked = []
    async with Database(settings, "test") as database:
        for _ in range(2):
            connection = await database.connect()
            statements: list[str] = []
            connection.add_query_logger(lambda record, kept=statements: kept.append(record.query))
            row = await connection.fetchrow(_QUERY, *_ARGUMENTS)
            assert row is not None
            assert tuple(row) == _ARGUMENTS
            asked.append(sum("typeinfo_tree" in statement for statement in statements))
            await connection.close()
    first, second = asked
    assert first > 0
    assert second == 0


async def test_types_of_a_database_are_asked_anew(settings: Settings) -> None:
    """Their ids differ between databases."""
    async with Database(settings, "test") as database:
        connection = await database.connect()
        await connection.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
        assert await connection.fetchval("SELECT ARRAY['sad', 'glad']::mood[]") == ["sad", "glad"]
        await connection.close()
    assert not array_types._known
