"""Searching results by their words: the newest that match, whether the words are rare or everywhere.

No plan is good for both, and a planner can only guess: so the newest results are looked through
first, which finds what is frequent, and only where they do not fill the page the index of words is
asked for the rest.
"""

from collections.abc import Sequence
from uuid import UUID

import asyncpg

from app.core.database import Connection, Database
from app.core.errors import FieldError, InvalidRequestError, SearchTooSlowError
from app.results.intersection import newest_of_all
from app.results.pages import ResultFilter, Walk, walks_of
from app.results.search_policy import SearchPolicy
from app.results.search_words import TEAM_MARK

# Results that are looked through before the index is asked; the second time only if the first has
# found so much that this should fill the page.
_WALKS = (1_000, 8_000)
_TIMEOUT_MILLISECONDS = 2_000
# For the places of a million matches; with less, whole pages are read for each.
_WORK_MEMORY = "32MB"

_LIMITS = f"""
SET LOCAL statement_timeout = {_TIMEOUT_MILLISECONDS};
SET LOCAL plan_cache_mode = force_custom_plan;
SET LOCAL max_parallel_workers_per_gather = 0;
SET LOCAL work_mem = '{_WORK_MEMORY}'
"""

# OFFSET 0 keeps the subqueries as they are, each result by its id: row by row in the order of the
# walk, which ends where the page is full.
_WALK = """
WITH walked AS MATERIALIZED ({walk}), found AS MATERIALIZED (
  SELECT w.id FROM walked w CROSS JOIN LATERAL (
    SELECT words FROM result_search WHERE result_id = w.id OFFSET 0) s
  WHERE s.words @@ websearch_to_tsquery('simple', ${words}) LIMIT {limit}
)
SELECT ARRAY(SELECT id FROM found) AS ids, count(*) AS walked,
  (SELECT id FROM walked ORDER BY id LIMIT 1) AS last,
  numnode(websearch_to_tsquery('simple', ${words})) AS nodes FROM walked
"""
_ASK_INDEX = """
SELECT s.result_id FROM (
  SELECT result_id FROM result_search
  WHERE words @@ (${team}::text::tsquery && websearch_to_tsquery('simple', ${words}))
    AND result_id < ${high} AND result_id >= ${low}
  ORDER BY result_id DESC OFFSET 0
) s CROSS JOIN LATERAL (
  SELECT id, team_id, model_name, context_id, state, error_code, error_retryable, metadata
  FROM results
  WHERE id = s.result_id OFFSET 0
) r WHERE {conditions} ORDER BY s.result_id DESC LIMIT {limit}
"""


def team_word(team_id: str) -> str:
    """The word that each searchable result of a team has, and no text."""
    return TEAM_MARK + team_id.encode().hex()


class ResultSearch:
    """Finds results of one team by words, or by conditions that several indexes serve."""

    def __init__(self, database: Database, policy: SearchPolicy) -> None:
        self._database = database
        self._policy = policy

    async def ids(
        self, team_id: str, narrowed: ResultFilter, *, after: UUID | None, limit: int
    ) -> Sequence[UUID]:
        """The newest below `after`. Raises InvalidRequestError, SearchOffError, SearchTooSlowError."""
        walks, words = walks_of(team_id, narrowed, after), narrowed.words
        if not walks:
            return []
        if words is None:
            return await self._database.run(lambda one: newest_of_all(one, walks, limit))
        await self._policy.check(team_id)

        async def work(connection: Connection) -> Sequence[UUID]:
            try:
                async with connection.transaction(readonly=True):
                    await connection.execute(_LIMITS)
                    return await _search(connection, team_id, words, walks[0], limit)
            except asyncpg.QueryCanceledError as error:
                message = "takes too long: too many results have some of these words"
                raise SearchTooSlowError(
                    f"The search {message}. Narrow it by time (created_after, created_before), by "
                    "model or by context, or add a rarer word.",
                    [FieldError("query.q", message)],
                ) from error
            except asyncpg.InternalServerError as error:
                # PostgreSQL's own bound on operators that wait for their words; it does not translate the text.
                if "tsquery stack" not in str(error):
                    raise
                message = "has too many operators in a row"
                raise InvalidRequestError(
                    f"q: {message}.", [FieldError("query.q", message)]
                ) from error

        return await self._database.run(work)


async def _search(
    connection: Connection, team_id: str, words: str, walk: Walk, limit: int
) -> Sequence[UUID]:
    found: list[UUID] = []
    for count in _WALKS:
        query = _WALK.format(
            walk=walk.select("id", count), words=len(walk.arguments) + 1, limit=limit - len(found)
        )
        walked = await connection.fetchrow(query, *walk.arguments, words)
        assert walked is not None, "it is a total"
        if not walked["nodes"]:
            message = "has no word to search by"
            raise InvalidRequestError(f"q: {message}.", [FieldError("query.q", message)])
        found += walked["ids"]
        if len(found) == limit or walked["walked"] < count:
            return found
        walk = walk.below(walked["last"])
        if len(found) * _WALKS[-1] < limit * _WALKS[0]:
            break
    count = len(walk.arguments)
    query = _ASK_INDEX.format(
        conditions=walk.conditions,
        limit=limit - len(found),
        **{name: count + place for place, name in enumerate(("team", "words", "high", "low"), 1)},
    )
    rows = await connection.fetch(
        query, *walk.arguments, f"'{team_word(team_id)}'", words, walk.high, walk.low
    )
    return [*found, *(row[0] for row in rows)]
