"""Export of results with their prompts: millions of rows in order, in little memory.

No cursor is held open: each page begins below the last row of the previous one. The sizes of a page are
read first, then its rows in pieces, each within the byte budget until the client has read it.
"""

from collections.abc import AsyncGenerator, Sequence
from uuid import UUID

from app.core.byte_budget import charged
from app.core.database import Database
from app.core.settings import Settings
from app.results.pages import LIST_COLUMNS, ResultFilter, walks_of
from app.results.rows import ExportedResult, ResultRow
from app.results.search import ResultSearch
from app.results.search_policy import SearchPolicy
from app.results.sizes import (
    PageSizes,
    following_of,
    json_bytes,
    pieces,
    text_bytes,
    vector_bytes,
)

_PAGE = 500  # rows
_PIECE_BYTES = 256_000  # of texts that are read at once; a longer one comes alone

# OFFSET 0: each context is found by its id; a generic plan would read all of them.
_CONTEXT = "CROSS JOIN LATERAL (SELECT * FROM contexts WHERE id = {row}.context_id OFFSET 0) c"
_SIZE = " + ".join(
    [
        text_bytes("p.output"),
        text_bytes("p.prompt_logprobs"),
        vector_bytes("p.vector"),
        text_bytes("c.content"),
        *map(json_bytes, ("p.logprobs", "c.messages")),
    ]
)
_SIZES = f"""
SELECT p.id, {_SIZE} AS size
FROM ({{page}}) p {_CONTEXT.format(row="p")} ORDER BY p.id DESC
"""
_SIZED_COLUMNS = "id, context_id, output, logprobs, prompt_logprobs, vector"
_FOUND = f"SELECT {_SIZED_COLUMNS} FROM results WHERE id = ANY($1::uuid[])"

_COLUMNS = ", ".join(
    f"r.{column}" if expression == column else expression
    for column, expression in LIST_COLUMNS.items()
)
_ROWS = f"""
SELECT {_COLUMNS}, CASE WHEN c.erased_at IS NULL THEN c.content END AS content,
  CASE WHEN c.erased_at IS NULL THEN c.messages END AS messages
FROM results r {_CONTEXT.format(row="r")}
WHERE r.id = ANY($1::uuid[]) AND r.team_id = $2 ORDER BY r.id DESC
"""


class ResultExport:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._search = ResultSearch(database, SearchPolicy(database, settings))

    async def read(
        self, team_id: str, narrowed: ResultFilter, *, after: UUID | None, limit: int | None
    ) -> AsyncGenerator[Sequence[ExportedResult], None]:
        """Results with the `content` or the `messages` of their contexts, newest first, in pieces.

        Results deleted meanwhile are left out. Raises DatabaseUnavailableError, MemoryBusyError, and
        as `ResultSearch.ids` does, also in the middle.
        """
        left = limit
        while left is None or left > 0:
            count = _PAGE if left is None else min(_PAGE, left)
            page = await self._sizes(team_id, narrowed, after, count)
            for ids, size in pieces(page.rows, _PIECE_BYTES):
                async with charged(size):
                    rows = await self._database.fetch(_ROWS, ids, team_id)
                    yield [
                        ExportedResult(ResultRow.of(row), row["content"], row["messages"])
                        for row in rows
                    ]
            if page.following is None:
                return
            after = page.following
            left = None if left is None else left - count

    async def _sizes(
        self, team_id: str, narrowed: ResultFilter, after: UUID | None, count: int
    ) -> PageSizes:
        walks = walks_of(team_id, narrowed, after)
        if narrowed.words is None and len(walks) == 1:
            query = _SIZES.format(page=walks[0].select(_SIZED_COLUMNS, count))
            return PageSizes.of(await self._database.fetch(query, *walks[0].arguments), count)
        ids = await self._search.ids(team_id, narrowed, after=after, limit=count)
        rows = await self._database.fetch(_SIZES.format(page=_FOUND), ids)
        return PageSizes(rows, following_of(ids, count))
