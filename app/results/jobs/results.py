"""Results of a job in the order of their ends, or by the keys of their rows."""

from collections.abc import Sequence
from uuid import UUID

import asyncpg

from app.core.database import Database
from app.queue.finish import READ_COLUMNS
from app.results.jobs.rows import EndedRow, EndState, KeyedRow
from app.results.rows import ResultRow
from app.results.sizes import PageSizes, SizedPage, json_bytes, read_page, text_bytes, vector_bytes

# Rows, not equalities: only the index of such rows has this order. Each index has the rows of one end.
_OF_END = """
(SELECT place, key, result_id, ended_as FROM job_rows
 WHERE (job_id, place) > ($1, $2) AND (job_id, place) < ($1, 9223372036854775807)
   AND ended_as {end} ORDER BY job_id, place LIMIT $3)
"""
_ENDS = {
    "completed": _OF_END.format(end="= 'completed'"),
    "failed": _OF_END.format(end="<> 'completed'"),
}
_PAGES: dict[EndState | None, str] = {
    None: f"{_ENDS['completed']} UNION ALL {_ENDS['failed']} ORDER BY place LIMIT $3",
    "completed": _ENDS["completed"],
    "failed": _ENDS["failed"],
}
_SIZE = " + ".join(
    (
        *map(text_bytes, ("output", "prompt_logprobs", "error_message")),
        vector_bytes("vector"),
        *map(json_bytes, ("logprobs", "parameters", "metadata")),
    )
)
# OFFSET 0: each result is found by its id; a deleted one has no size.
_SIZED = f"""
SELECT k.place, k.key, k.result_id AS id, k.ended_as, coalesce(r.size, 0) AS size
FROM ({{page}}) k LEFT JOIN LATERAL (
  SELECT {_SIZE} AS size FROM results WHERE id = k.result_id OFFSET 0) r ON true
ORDER BY k.place
"""
# The row of each key, if there is one, and the size of its result.
_BY_KEY = f"""
SELECT k.key, j.place, j.result_id AS id, j.ended_as, coalesce(r.size, 0) AS size
FROM unnest($2::text[]) WITH ORDINALITY AS k(key, number)
LEFT JOIN LATERAL (
  SELECT place, result_id, ended_as FROM job_rows WHERE key = k.key AND job_id = $1 OFFSET 0) j ON true
LEFT JOIN LATERAL (SELECT {_SIZE} AS size FROM results WHERE id = j.result_id OFFSET 0) r ON true
ORDER BY k.number
"""
_FOUND = f"""
SELECT {", ".join(READ_COLUMNS)} FROM results WHERE id = ANY($1::uuid[]) AND team_id = $2
"""


class JobResults:
    """Reads rows; the caller knows that the job is the team's."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, team_id: str, job_id: UUID, *, state: EndState | None, after: int, limit: int
    ) -> SizedPage[EndedRow]:
        """Ended rows behind the place `after`, with their results. Raises MemoryBusyError."""
        statement = _SIZED.format(page=_PAGES[state])
        sizes = await self._database.fetch(statement, job_id, after, limit)
        page = await read_page(
            PageSizes.of(sizes, limit), lambda ids: self._database.fetch(_FOUND, ids, team_id)
        )
        results = {row["id"]: ResultRow.of(row) for row in page.rows}
        ids = [row["id"] for row in sizes]
        done = len(ids) if page.following is None else ids.index(page.following) + 1
        return SizedPage([_ended(row, results) for row in sizes[:done]], page.following)

    async def keys(
        self, job_id: UUID, *, state: EndState | None, after: int, limit: int
    ) -> Sequence[EndedRow]:
        """Ended rows behind the place `after`, without their results."""
        rows = await self._database.fetch(_PAGES[state], job_id, after, limit)
        return [EndedRow(**row, result=None) for row in rows]

    async def by_keys(self, team_id: str, job_id: UUID, keys: Sequence[str]) -> Sequence[KeyedRow]:
        """The rows of these keys, in their order; the first ones, if their results fill a page.

        Raises MemoryBusyError.
        """
        sizes = await self._database.fetch(_BY_KEY, job_id, keys)
        known = [row for row in sizes if row["id"] is not None]
        page = await read_page(
            PageSizes(known, None), lambda ids: self._database.fetch(_FOUND, ids, team_id)
        )
        results = {row["id"]: ResultRow.of(row) for row in page.rows}
        done = len(sizes)
        if page.following is not None:
            done = [row["id"] for row in sizes].index(page.following) + 1
        return [
            KeyedRow(row["key"], row["id"], row["place"], row["ended_as"], results.get(row["id"]))
            for row in sizes[:done]
        ]


def _ended(row: asyncpg.Record, results: dict[UUID, ResultRow]) -> EndedRow:
    result = results.get(row["id"])
    return EndedRow(row["place"], row["key"], row["id"], row["ended_as"], result)
