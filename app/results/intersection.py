"""Results that several filters narrow: the newest that match all, whichever filter is the rare one.

An index serves one filter, and the others are tested row by row; which of them has the fewest rows is not
known before. So each filter's index is walked in turn, four times as far each time, until one walk has
filled the page or has ended. It reads a few times as many rows as the best walk alone.
"""

from collections.abc import Sequence
from uuid import UUID

from app.core.database import Connection
from app.results.pages import Walk

_FIRST_ROWS = 250  # of a walk
_GROWTH = 4
_MOST_ROWS = 64_000  # of a statement

# The aggregates take the rows in the order of the walk, which reads the index alone where that has all columns.
# The number of rows is a literal: for one that it does not know, a generic plan may sort all of the team's rows.
_PIECE = """
SELECT (array_agg(id) FILTER (WHERE is_found))[:${limit}::int] AS ids, (array_agg(id))[count(*)] AS last,
  count(*) AS rows
FROM (
  SELECT id, {tests} AS is_found FROM {source} WHERE {bounds} ORDER BY {order} LIMIT {rows}
) walked
"""


async def newest_of_all(
    connection: Connection, walks: Sequence[Walk], limit: int
) -> Sequence[UUID]:
    """The newest ids, at most `limit`, that each of the walks finds."""
    parts, rows = [_Part(walk, limit) for walk in walks], _FIRST_ROWS
    while True:
        for part in parts:
            if await part.go_on(connection, rows):
                return part.found
        rows = min(_GROWTH * rows, _MOST_ROWS)


class _Part:
    """A walk, and what it has found so far."""

    def __init__(self, walk: Walk, limit: int) -> None:
        self._walk = walk
        self._limit = limit
        self.found: list[UUID] = []

    async def go_on(self, connection: Connection, rows: int) -> bool:
        """Walk over so many further rows; True if it has ended, or found enough."""
        walk, count = self._walk, len(self._walk.arguments)
        query = _PIECE.format(
            tests=walk.tests,
            source=walk.source,
            bounds=walk.bounds,
            order=walk.order,
            rows=int(rows),
            limit=count + 1,
        )
        left = self._limit - len(self.found)
        piece = await connection.fetchrow(query, *walk.arguments, left)
        assert piece is not None, "it is a total"
        self.found += piece["ids"] or ()
        if piece["rows"] < rows or len(self.found) == self._limit:
            return True
        self._walk = walk.below(piece["last"])
        return False
