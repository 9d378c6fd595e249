"""Connections that learn PostgreSQL's array types once per process.

asyncpg asks each new connection for the types of arrays (`uuid[]`), by a recursive query that takes
PostgreSQL about 20 ms: as long as the rest of the connection's start.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import asyncpg

# Below it, the ids of types are the same in every database of every version: FirstGenbkiObjectId of
# PostgreSQL's access/transam.h.
_FIRST_OTHER_ID = 10_000
# asyncpg prepares its caller's statement again if the question has replaced it: none was asked.
_NO_QUESTION = SimpleNamespace(name="known")

_known: dict[frozenset[int], Any] = {}  # by ids: the answer's rows


class Connection(asyncpg.Connection):
    """A connection; the process asks for the types of PostgreSQL's own only once."""

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> Any:  # noqa: ASYNC109 - asyncpg's own parameter
        asked = frozenset(typeoids)
        if rows := _known.get(asked):
            return rows, _NO_QUESTION
        rows, statement = await super()._introspect_types(asked, timeout)  # type: ignore[misc]
        if max(asked) < _FIRST_OTHER_ID:
            _known[asked] = rows
        return rows, statement
