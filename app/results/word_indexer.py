"""Indexing of the words of results whose texts are long: behind the totals, which never wait for them.

`undigested_results` has two queues. Places above 0 are results that ended and are not counted; a negative
place is that of a counted result whose words are due. A former version reads the first ones only. The words
of short texts are found by the statement that counts, see `indexer`: another one would cost more than they do.

The text of one team must not delay another's: the newest results come first, those of a team behind the
first ones of the others, each turn for a bounded time; what is left of it has turns of its own. A result
whose words cannot be found, or not in time, is found by the beginning of its texts, or stays without words.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

import asyncpg

from app.core import metrics
from app.core.database import Connection, Database, is_transient
from app.core.settings import Settings
from app.core.waiting import is_set_within
from app.results.search_policy import is_searchable_sql
from app.results.search_words import CHARACTERS, FEW_CHARACTERS, team_words_sql, words_sql

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
_BROKEN_SECONDS = 60.0
_MAX_ROWS = 500  # looked at in a turn
_PIECE_BYTES = 200_000  # of the texts of a transaction; the slowest ones take PostgreSQL 2 s
_TURN_SECONDS = 2.0
_STATEMENT_MILLISECONDS = 2_500
_FIRST = -(2**63)

# Its text, not its row: the row itself, or the memory of the process, is no reason.
FAULTS_OF_TEXTS = (
    asyncpg.ProgramLimitExceededError,
    asyncpg.QueryCanceledError,
    asyncpg.DataError,
)

# `least` ignores NULL: a text that is absent must not count as the longest. Messages that are stored
# compressed do.
TEXT_SIZE = f"""least(coalesce(octet_length(r.output), 0), {CHARACTERS})
  + coalesce(octet_length(r.error_message), 0)
  + CASE WHEN c.messages IS NULL THEN least(coalesce(octet_length(c.content), 0), {CHARACTERS})
    WHEN pg_column_compression(c.messages) IS NULL THEN least(pg_column_size(c.messages), {CHARACTERS})
    ELSE {CHARACTERS} END"""
# OFFSET 0: each row is found by its id. A generic plan would join whole tables, as it does not know
# how few are asked for. The newest first, behind the place $2.
_DUE = f"""
SELECT u.place, u.result_id AS id, r.team_id, r.id IS NULL OR s.result_id IS NULL AS is_gone, {TEXT_SIZE} AS size
FROM (
  SELECT place, result_id FROM undigested_results WHERE place < 0 AND place > $2 ORDER BY place LIMIT $1
) u
LEFT JOIN LATERAL (SELECT * FROM results WHERE id = u.result_id OFFSET 0) r ON true
LEFT JOIN LATERAL (SELECT result_id FROM result_search WHERE result_id = u.result_id OFFSET 0) s ON true
LEFT JOIN LATERAL (SELECT * FROM contexts WHERE id = r.context_id OFFSET 0) c ON true
ORDER BY u.place
"""  # noqa: S608 - of our own constants
_DISMISS = "DELETE FROM undigested_results WHERE place = ANY($1::bigint[])"


def is_searched_sql(search: str) -> str:
    """A condition: the result `r` has words; `search` is the setting.

    A text that is not to be stored leaves none behind, and none does where the search is off.
    """
    return f"""r.kind = 'generation' AND r.store AND r.erased_at IS NULL
          AND {is_searchable_sql("r.team_id", search)}"""


# A statement of its own: the next one sees the texts as they are once the row is held. A transaction that
# erases a prompt holds it too, see `retention`.
_LOCK = """
SELECT result_id FROM result_search WHERE result_id = ANY($1::uuid[])
ORDER BY result_id FOR NO KEY UPDATE SKIP LOCKED
"""
# The words of a context are found once for all of its results: parsing a long one takes longer than all else.
CONTENT = """coalesce(c.content, (SELECT string_agg(m ->> 'content', E'\\n' ORDER BY place)
        FROM jsonb_array_elements(
          CASE jsonb_typeof(c.messages) WHEN 'array' THEN c.messages END) WITH ORDINALITY AS i(m, place)), '')"""
_ANSWER = "concat_ws(E'\\n', left(r.output, $3), left(r.error_message, $3))"
_INDEX = f"""
WITH due AS MATERIALIZED (
  DELETE FROM undigested_results WHERE place = ANY($2::bigint[]) AND result_id = ANY($1::uuid[])
  RETURNING result_id
), parsed AS MATERIALIZED (
  SELECT e.ids, e.words, CASE WHEN e.is_searched AND c.erased_at IS NULL
    THEN {words_sql(CONTENT, "$3")} ELSE '' END AS context_words
  FROM (
    SELECT context_id, array_agg(id) AS ids, array_agg(words) AS words, count(words) > 0 AS is_searched
    FROM (
      SELECT r.context_id, r.id,
        CASE WHEN {is_searched_sql("$4")}
        THEN {words_sql(_ANSWER, "2 * $3")} || {team_words_sql("r.team_id")} END AS words
      FROM results r WHERE r.id = ANY (ARRAY(SELECT result_id FROM due))
      OFFSET 0) r  -- or each use of its words would find them again
    GROUP BY context_id) e
  CROSS JOIN LATERAL (SELECT * FROM contexts WHERE id = e.context_id OFFSET 0) c
)
UPDATE result_search s SET words = r.context_words || r.words
FROM (SELECT p.context_words, i.* FROM parsed p CROSS JOIN LATERAL unnest(p.ids, p.words) AS i(id, words)) r
WHERE s.result_id = ANY($1::uuid[]) AND s.result_id = r.id AND r.words IS NOT NULL
"""  # noqa: S608 - of our own constants


class WordIndexer:
    """Finds the words of counted results; any number of processes may run it."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._search = settings.search
        self._wake = asyncio.Event()
        self._place = (
            _FIRST  # of the last one looked at among those that had no turn when they came
        )

    def wake(self) -> None:
        """End the pause of `run`: results were counted."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            began = time.monotonic()
            try:
                if await self.index():
                    # As long as it has worked: the other half of PostgreSQL's time is for others.
                    await asyncio.sleep(time.monotonic() - began)
                else:
                    await is_set_within(self._wake, _PERIOD_SECONDS)
            except Exception as error:
                # No response depends on it, and no total.
                pause = _PERIOD_SECONDS
                if not is_transient(error):
                    pause = _BROKEN_SECONDS
                    logger.exception("words are not indexed", extra={"action": "words_failed"})
                await asyncio.sleep(pause)

    async def index(self) -> bool:
        """A turn of the newest ones, and one of those that are left; True if more are due."""
        newest = await self._look(_FIRST)
        done = await self._index_in_turns(newest)
        if len(newest) < _MAX_ROWS:
            self._place = _FIRST
            return done < len(newest)
        older = await self._look(max(self._place, newest[-1]["place"]))
        await self._index_in_turns(older)
        self._place = older[-1]["place"] if len(older) == _MAX_ROWS else _FIRST
        return True

    async def _look(self, place: int) -> Sequence[asyncpg.Record]:
        return await self._database.fetch(_DUE, _MAX_ROWS, place)

    async def _index_in_turns(self, rows: Sequence[asyncpg.Record]) -> int:
        """Index for a turn's time; the number of rows that had their turn."""
        gone = [row["place"] for row in rows if row["is_gone"]]
        if gone:
            await self._database.fetch(_DISMISS, gone)
        done, ends_at = len(gone), time.monotonic() + _TURN_SECONDS
        for piece in pieces_in_turns([row for row in rows if not row["is_gone"]]):
            if time.monotonic() >= ends_at:
                break
            await self._index_piece(piece)
            done += len(piece)
        return done

    async def _index_piece(self, rows: Sequence[asyncpg.Record]) -> None:
        async def work(connection: Connection) -> None:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL statement_timeout = {_STATEMENT_MILLISECONDS}")
                locked = await connection.fetch(_LOCK, [row["id"] for row in rows])
                ids = {row["result_id"] for row in locked}
                await self._index(connection, [row for row in rows if row["id"] in ids], CHARACTERS)

        await self._database.run(work)

    async def _index(
        self, connection: Connection, rows: Sequence[asyncpg.Record], characters: int
    ) -> None:
        if not rows:
            return
        ids, places = [row["id"] for row in rows], [row["place"] for row in rows]
        try:
            async with connection.transaction():
                await connection.execute(_INDEX, ids, places, characters, self._search)
        except FAULTS_OF_TEXTS as error:
            if len(rows) > 1:
                half = len(rows) // 2
                await self._index(connection, rows[:half], characters)
                await self._index(connection, rows[half:], characters)
            elif characters > FEW_CHARACTERS:
                await self._index(connection, rows, FEW_CHARACTERS)
            else:
                await connection.execute(_DISMISS, places)
                metrics.WITHOUT_WORDS.inc()
                logger.warning(
                    "a result is stored without its words",
                    extra={
                        "action": "without_words",
                        "result_id": str(ids[0]),
                        "error": type(error).__name__,
                    },
                )


def pieces_in_turns(rows: Sequence[asyncpg.Record]) -> Iterator[list[asyncpg.Record]]:
    """The rows of each transaction: first those whose team has asked for the least up to them."""
    asked: dict[str, int] = {}
    ordered: list[tuple[int, asyncpg.Record]] = []
    for row in rows:
        asked[row["team_id"]] = asked.get(row["team_id"], 0) + row["size"]
        ordered.append((asked[row["team_id"]], row))
    ordered.sort(key=lambda one: one[0])
    piece: list[asyncpg.Record] = []
    size = 0
    for _, row in ordered:
        if piece and size + row["size"] > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += row["size"]
    if piece:
        yield piece
