"""Counting of ended results: the totals of their minutes, and the ledger of usage.

The statement that ends a result leaves its id in `undigested_results`. Each worker takes these in
batches, and skips the ids that other workers hold: one transaction removes an id, writes the result's row
of `result_search`, and adds the result to its minute and to the ledger. That row marks it as
counted, so that each result is counted once, independent of crashes, late commits and clocks. The
transaction finds the words of short texts, of a bounded size together, and of none if one has a fault: it
leaves the others to `word_indexer`, in a queue of its own.

Results that ended under a version without the index are found by a walk over all results, newest
first, a few at a time, with pauses; a day later by a second walk. It skips indexed ones
that the ledger has. One process walks at a time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import asyncpg

from app.core.database import Connection, Database, is_transient
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results.rows import EndedResult
from app.results.search_words import team_words_sql, words_sql
from app.results.stats.totals import add_to_minutes, observe
from app.results.usage import ledger
from app.results.word_indexer import (
    CONTENT,
    FAULTS_OF_TEXTS,
    TEXT_SIZE,
    WordIndexer,
    is_searched_sql,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
# Rows that were committed late or locked lie before the place where the last batch ended. A look from
# the first place on reads all dead rows until they are vacuumed, so it is done only this often.
_LATE_SECONDS = 5.0
_MAX_ROWS = 500  # results of a transaction
_MAX_DELETED = 1_000  # minutes of a statement
_BROKEN_SECONDS = 60.0
# Bytes of texts whose words are found as they are counted: of one result, and of a transaction, for which
# PostgreSQL takes at most 1 s.
_SHORT_BYTES = 2_000
_ALL_SHORT_BYTES = 100_000
# Results whose words are due: with more, the walk over older ones pauses.
_MAX_WAITING = 10_000

# Workers of a former version hold this lock exclusively: they index one at a time.
_SHARED_LOCK = "SELECT pg_try_advisory_xact_lock_shared(hashtext('digest'), 0)"
_WALK_LOCK = """
SELECT pg_try_advisory_xact_lock_shared(hashtext('digest'), 0)
  AND pg_try_advisory_xact_lock(hashtext('digest'), 1)
"""
_LOOK = f"""
SELECT EXISTS (SELECT FROM undigested_results WHERE place > $1) AS is_due,
  passes_left > 0 AND resumes_at <= now() AND NOT EXISTS (
    SELECT FROM undigested_results WHERE place < 0 OFFSET {_MAX_WAITING} LIMIT 1) AS may_walk,
  sampled_minute IS DISTINCT FROM date_trunc('minute', now()) AS is_new_minute
FROM digest_state
"""

# OFFSET 0: each row is found by its id. A generic plan would join whole tables, as it does not know
# how few are asked for.
_DUE = """
SELECT u.place, u.result_id AS id, true AS is_due, NOT EXISTS (
  SELECT FROM (SELECT id FROM results WHERE id = u.result_id OFFSET 0) r) AS is_gone
FROM (
  SELECT * FROM undigested_results WHERE place > $2 ORDER BY place LIMIT $1 FOR UPDATE SKIP LOCKED
) u ORDER BY u.place
"""
_DISMISS = "DELETE FROM undigested_results WHERE place = ANY($1::bigint[])"

# Every row that it walks over, so that each step is a small one.
_WALK = """
SELECT 0 AS place, r.id, r.state <> 'pending' AND s.result_id IS NULL AS is_due,
  s.in_usage IS FALSE AS is_unsettled
FROM (SELECT id, state FROM results WHERE id < $2 ORDER BY id DESC LIMIT $1) r
LEFT JOIN LATERAL (SELECT result_id, in_usage FROM result_search
  WHERE result_id = r.id OFFSET 0) s ON true
ORDER BY r.id DESC
"""

# Results are locked in the order of ids, as all lock them. A negative place: the words are due.
_TEXTS = "concat_ws(E'\\n', content, output, error_message)"


def _count_sql(wait: str) -> str:
    return f"""
WITH held AS MATERIALIZED (
  SELECT id, team_id FROM results WHERE id = ANY($1::uuid[]) AND state <> 'pending'
  ORDER BY id FOR KEY SHARE {wait}
), texts AS MATERIALIZED (
  SELECT *, size <= $5 AND sum(size) FILTER (WHERE size <= $5) OVER (ORDER BY id) <= {_ALL_SHORT_BYTES} AS is_short
  FROM (
    SELECT r.id, r.output, r.error_message, c.content, c.messages, {TEXT_SIZE} AS size
    FROM results r CROSS JOIN LATERAL (SELECT * FROM contexts WHERE id = r.context_id OFFSET 0) c
    WHERE r.id = ANY (ARRAY(SELECT id FROM held)) AND {is_searched_sql("$4")}) r
), marked AS (
  INSERT INTO result_search (result_id, team_id, in_usage, words)
  SELECT id, team_id, true, (
    SELECT {words_sql(_TEXTS, str(_SHORT_BYTES))} || {team_words_sql("team_id")}
    FROM (SELECT {CONTENT} AS content OFFSET 0) _ WHERE is_short)
  FROM held LEFT JOIN texts c USING (id) ORDER BY id
  ON CONFLICT DO NOTHING RETURNING result_id
), dismissed AS (
  DELETE FROM undigested_results
  WHERE place = ANY($2::bigint[]) AND result_id = ANY (ARRAY(SELECT id FROM held))
), with_long_texts AS (
  INSERT INTO undigested_results (place, result_id)
  SELECT -nextval((SELECT pg_get_serial_sequence('undigested_results', 'place')::regclass)), id
  FROM texts WHERE NOT is_short AND id = ANY (ARRAY(SELECT result_id FROM marked))
  RETURNING result_id
)
SELECT id, team_id, model_name, coalesce(error_code, 'completed') AS ended_as,
  CASE WHEN reused_from IS NULL THEN prompt_tokens END AS prompt_tokens,
  CASE WHEN reused_from IS NULL THEN completion_tokens END AS completion_tokens, started_at, first_token_at, finished_at,
  CASE jsonb_typeof(parameters -> 'max_tokens')
    WHEN 'number' THEN (parameters ->> 'max_tokens')::float8 END AS max_tokens,
  finished_at >= now() - make_interval(days => $3) AS is_counted,
  finished_at >= now() - interval '1 minute' AS is_recent,
  id = ANY (ARRAY(SELECT result_id FROM with_long_texts)) AS is_long,
  kind, prompt IS NOT NULL AS is_chat
FROM results WHERE id = ANY (ARRAY(SELECT result_id FROM marked))
"""


# The pause is a multiple of the step's time, and holds for every process.
_FROM = "SELECT digested_from FROM digest_state WHERE passes_left > 0 AND resumes_at <= now()"
_STEP = """
UPDATE digest_state SET digested_from = $1,
  resumes_at = clock_timestamp() + 4 * (clock_timestamp() - now())
"""
_BEGIN_ANEW = """
UPDATE digest_state SET passes_left = passes_left - 1, resumes_at = now() + interval '1 day',
  digested_from = 'ffffffff-ffff-ffff-ffff-ffffffffffff'
"""

_BEGIN_MINUTE = """
UPDATE digest_state SET sampled_minute = date_trunc('minute', now())
WHERE sampled_minute IS DISTINCT FROM date_trunc('minute', now()) RETURNING sampled_minute
"""
_SAMPLE = """
INSERT INTO queue_samples (minute, name, queued, running)
SELECT $1, * FROM unnest($2::text[], $3::int[], $4::int[]) ON CONFLICT DO NOTHING
"""
_FORGET = """
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM {table} WHERE minute < now() - make_interval(days => $1) LIMIT $2))
"""


class ResultIndexer:
    """Counts ended results, and samples the queues once a minute; any number of processes may run it."""

    def __init__(self, database: Database, depth: QueueDepth, settings: Settings) -> None:
        self._database = database
        self._depth = depth
        self._days = settings.history_days
        self._search = settings.search
        self.words = WordIndexer(database, settings)
        self._max_rows = _MAX_ROWS
        self._place = 0  # where the last batch ended
        self._looked_at = 0.0  # monotonic time of the last look from the first place on

    async def run(self) -> None:
        while True:
            try:
                pause = await self.step()
                self._max_rows = min(_MAX_ROWS, 2 * self._max_rows)
            except Exception as error:
                # No response depends on it: the process continues, with fewer results at once.
                self._max_rows = max(1, self._max_rows // 4)
                pause = _PERIOD_SECONDS
                if not is_transient(error):
                    pause = _BROKEN_SECONDS
                    logger.exception("results are not digested", extra={"action": "not_digested"})
            await asyncio.sleep(pause)

    async def step(self) -> float:
        """Count the next results; the seconds to pause afterwards, even if there are more."""
        began = time.monotonic()
        if began - self._looked_at >= _LATE_SECONDS:
            self._place, self._looked_at = 0, began
        (look,) = await self._database.fetch(_LOOK, self._place)
        if look["is_new_minute"]:
            await self._begin_minute()
        if look["is_due"] and await self.count():
            return time.monotonic() - began
        if look["may_walk"] and await self.index_older():
            return min(_PERIOD_SECONDS, 5 * (time.monotonic() - began))
        return _PERIOD_SECONDS

    async def index(self) -> bool:
        """Count the next results, and index the next words; True if more are due."""
        is_more = await self.count()
        return await self.words.index() or is_more

    async def count(self) -> bool:
        ended: list[EndedResult] = []

        async def work(connection: Connection, short: int) -> tuple[int, bool]:
            ended.clear()
            async with connection.transaction():
                if not await connection.fetchval(_SHARED_LOCK):
                    return self._place, False
                rows = await connection.fetch(_DUE, self._max_rows, self._place)
                gone = [row["place"] for row in rows if row["is_gone"]]
                if gone:
                    await connection.execute(_DISMISS, gone)
                ended.extend(await self._count(connection, rows, "SKIP LOCKED", short))
            return rows[-1]["place"] if rows else self._place, len(rows) == self._max_rows

        self._place, is_more = await self._database.run(partial(_try_with_texts, work))
        for result in ended:
            observe(result)
        if any(result.is_long for result in ended):
            self.words.wake()
        return is_more

    async def index_older(self) -> bool:
        ended: list[EndedResult] = []

        async def work(connection: Connection, short: int) -> bool:
            ended.clear()
            async with connection.transaction():
                if not await connection.fetchval(_WALK_LOCK):
                    return False
                digested_from = await connection.fetchval(_FROM)
                if digested_from is None:
                    return False
                rows = await connection.fetch(_WALK, self._max_rows, digested_from)
                ended.extend(await self._count(connection, rows, "", short))
                unsettled = [row["id"] for row in rows if row["is_unsettled"]]
                await ledger.settle(connection, unsettled)
                if rows:
                    await connection.execute(_STEP, rows[-1]["id"])
                else:
                    await connection.execute(_BEGIN_ANEW)
            return bool(rows)

        is_more = await self._database.run(partial(_try_with_texts, work))
        for result in ended:
            if result.is_recent:  # older ones were observed when they ended
                observe(result)
        return is_more

    async def _count(
        self, connection: Connection, rows: Sequence[asyncpg.Record], wait: str, short: int
    ) -> Sequence[EndedResult]:
        """`short`: the bytes of texts whose words are found now."""
        due = [row for row in rows if row["is_due"]]
        if not due:
            return []
        ids, places = [row["id"] for row in due], [row["place"] for row in due]
        found = await connection.fetch(
            _count_sql(wait), ids, places, self._days, self._search, short
        )
        results = [EndedResult(**row) for row in found]
        await ledger.add(connection, [one.id for one in results])
        await add_to_minutes(connection, (one for one in results if one.is_counted))
        return results

    async def _begin_minute(self) -> None:
        """Once a minute, in one process: sample the queues, and delete old totals and samples."""
        rows = await self._database.fetch(_BEGIN_MINUTE)
        if not rows:
            return
        loads = await self._depth.by_model()
        queued = [load.queued for load in loads.values()]
        running = [load.running for load in loads.values()]
        minute = rows[0]["sampled_minute"]
        await self._database.fetch(_SAMPLE, minute, list(loads), queued, running)
        await ledger.compact(self._database)
        for table in ("minute_stats", "queue_samples"):
            await self._forget(_FORGET.format(table=table))

    async def _forget(self, statement: str) -> None:
        async def work(connection: Connection) -> str:
            return await connection.execute(statement, self._days, _MAX_DELETED)

        while await self._database.run(work) == f"DELETE {_MAX_DELETED}":
            pass


async def _try_with_texts(
    work: Callable[[Connection, int], Awaitable[T]], connection: Connection
) -> T:
    """Run a transaction that finds the words of short texts; of none if one of them has a fault."""
    try:
        return await work(connection, _SHORT_BYTES)
    except FAULTS_OF_TEXTS:
        return await work(connection, 0)
