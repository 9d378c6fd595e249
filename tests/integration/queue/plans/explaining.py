"""A database that explains each statement as it executes it, and undoes all of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import asyncpg
import orjson

from app.core.database import Connection, Database
from app.core.settings import Settings

_EXECUTES = ("execute", "fetch", "fetchrow", "fetchval")
_EXPLAINED = ("WITH", "SELECT", "INSERT", "UPDATE", "DELETE")
_DISCARDED = (
    "Rows Removed by Filter", "Rows Removed by Join Filter", "Rows Removed by Index Recheck",
)  # fmt: skip


@dataclass(slots=True, frozen=True)
class Reading:
    """Pages and rows that one execution of a statement read, by its plan.

    `buffers`: pages of tables and indexes that its scans touched. `rows`: rows that any node
    returned or discarded.
    """

    query: str
    plan: dict[str, Any]
    buffers: int
    rows: int

    @classmethod
    def of(cls, query: str, plan: dict[str, Any]) -> Self:
        buffers, rows = 0, 0.0
        for node in nodes(plan):
            found = node["Actual Rows"] + sum(node.get(name, 0) for name in _DISCARDED)
            rows += found * node["Actual Loops"]
            if _is_scan(node):
                inner = [one for one in node.get("Plans", ()) if "Subplan Name" in one]
                buffers += _buffers(node) - sum(map(_buffers, inner))
        return cls(query, plan, buffers, round(rows))

    def largest_scan(self) -> str:
        """Describe the scan that touched most pages."""
        scans = [node for node in nodes(self.plan) if _is_scan(node)]
        if not scans:
            return "no scan"
        node = max(scans, key=_buffers)
        bitmap = [
            one.get("Index Name") for one in nodes(node) if "Bitmap Index" in one["Node Type"]
        ]
        name = node.get("Index Name") or ", ".join(filter(None, bitmap)) or node["Relation Name"]
        return f"{node['Node Type']} of {name}: {_buffers(node)} buffers"


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def _is_scan(node: dict[str, Any]) -> bool:
    return "Relation Name" in node and node["Node Type"] != "ModifyTable"


def _buffers(node: dict[str, Any]) -> int:
    return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])


class ExplainingDatabase(Database):
    """The service's database on one session, whose generic plans stay as long as PostgreSQL keeps them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, "test")
        self.readings: list[Reading] = []
        self._one_at_a_time = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._session = await self.connect()
        self._explained = _Explained(self._session, self.readings)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()
        await super().__aexit__(*error)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with self._one_at_a_time:
            yield cast(Connection, self._explained)

    @contextlib.asynccontextmanager
    async def undone(self) -> AsyncIterator[list[Reading]]:
        """A transaction that is rolled back; the readings of its statements."""
        self.readings.clear()
        transaction = self._session.transaction()
        await transaction.start()
        try:
            yield self.readings
        finally:
            await transaction.rollback()


class _Explained:
    """A connection that runs each statement twice: explained, which is undone, and for its answer."""

    def __init__(self, connection: asyncpg.Connection, readings: list[Reading]) -> None:
        self._connection, self._readings = connection, readings
        self._names: dict[str, str] = {}  # of prepared statements, by their texts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._connection, name)
        if name not in _EXECUTES:
            return method

        async def run(query: str, *arguments: object, **options: object) -> object:
            if query.lstrip().startswith(_EXPLAINED):
                await self._explain(query, arguments)
            return await method(query, *arguments, **options)

        return run

    async def _explain(self, query: str, arguments: Sequence[object]) -> None:
        name = self._names.get(query)
        transaction = self._connection.transaction()
        await transaction.start()
        try:
            if name is None:
                name = self._names[query] = f"explained_{len(self._names)}"
                await self._connection.execute(f"PREPARE {name} AS {query}")
            values = f"({', '.join(map(_literal, arguments))})" if arguments else ""
            text = await self._connection.fetchval(
                f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE {name}{values}"
            )
        finally:
            await transaction.rollback()
        self._readings.append(Reading.of(query, orjson.loads(text)[0]["Plan"]))


def _literal(value: Any) -> str:
    """An argument as EXECUTE takes it: text that PostgreSQL reads as the parameter's type."""
    if value is None:
        return "NULL"
    if isinstance(value, list | tuple):
        return _quote("{" + ",".join(map(_member, value)) + "}")
    return _quote(_text(value))


def _member(value: Any) -> str:
    if value is None:
        return "NULL"
    text = _text(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _text(value: Any) -> str:
    return "\\x" + value.hex() if isinstance(value, bytes) else str(value)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
