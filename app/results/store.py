"""Reading results: by id (concurrent readers share a statement), in pages, with their attempts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from uuid import UUID

import asyncpg

from app.core.database import Connection, Database
from app.core.errors import ConflictError, NotFoundError
from app.core.group_commit import Batcher
from app.core.settings import Settings
from app.queue.finish import READ_COLUMNS
from app.queue.job_queue import JobQueue
from app.results.pages import LIST_COLUMNS, ResultFilter, page_of
from app.results.rows import AttemptsRow, ListedResult, ResultRow, SubmittedRequest
from app.results.search import ResultSearch

_MAX_BATCH = 500
LIST_TEXT_CHARACTERS = 1000
PROMPT_START_CHARACTERS = 200
# A longer text is read by itself. The size is the stored (compressed) one, known without reading it.
_LONG_BYTES = 32_768

_LONG_COLUMNS = ", ".join(LIST_COLUMNS.values())
_SHORTENED = {
    # An attribution is not a text: half of its JSON is useless.
    "output": f"CASE kind WHEN 'generation' THEN left(output, {LIST_TEXT_CHARACTERS}) END AS output",
    # Many times as long as the text.
    "logprobs": "NULL::jsonb AS logprobs",
}
_SHORT_COLUMNS = ", ".join((LIST_COLUMNS | _SHORTENED).values())

# Only the start of a text is read. Messages are read whole, so long ones are left out; the last message
# represents a chat.
_PROMPT_START = f"""
(SELECT CASE WHEN c.erased_at IS NOT NULL THEN NULL
  WHEN c.content IS NOT NULL THEN left(c.content, {PROMPT_START_CHARACTERS})
  WHEN pg_column_size(c.messages) <= {_LONG_BYTES}
    THEN left(c.messages -> -1 ->> 'content', {PROMPT_START_CHARACTERS})
  END FROM contexts c WHERE c.id = results.context_id) AS prompt_start
"""

_BY_GROUP = f"SELECT {', '.join(READ_COLUMNS)} FROM results WHERE group_id = $1 AND team_id = $2 ORDER BY id"

# Readers of short results share a statement. A long text is fetched separately, so that they do not
# wait for it.
_LONG = (
    f"coalesce(pg_column_size(output), 0) + coalesce(pg_column_size(logprobs), 0) > {_LONG_BYTES}"
)
_SHORT_ONLY = ", ".join(
    f"CASE WHEN NOT ({_LONG}) THEN {column} END AS {column}"
    if column in ("output", "logprobs")
    else column
    for column in READ_COLUMNS
)
_BY_IDS = f"SELECT {_SHORT_ONLY}, {_LONG} AS is_long FROM results WHERE id = ANY($1::uuid[])"
_BY_ID = f"SELECT {', '.join(READ_COLUMNS)} FROM results WHERE id = $1"

_FOUND = """
SELECT {columns} FROM results WHERE id = ANY($1::uuid[]) AND team_id = $2 ORDER BY id DESC
"""

_REQUEST = f"""
SELECT {", ".join(field.name for field in fields(SubmittedRequest))}
FROM results WHERE id = $1 AND team_id = $2
"""

_NEWEST_ABOUT = f"""
SELECT {", ".join(READ_COLUMNS)} FROM results
WHERE source_id = $1 AND team_id = $2 AND model_name = $3 ORDER BY id DESC LIMIT 1
"""

_PARTIAL = """
SELECT coalesce(string_agg(c.text, '' ORDER BY c."offset"), '') FROM results r
LEFT JOIN result_chunks c ON c.result_id = r.id
  AND c.attempt BETWEEN coalesce(r.text_attempt, r.attempt) AND r.attempt
WHERE r.id = $1 AND r.team_id = $2
"""

# In the order of ids, like every statement that locks several.
_DELETE = """
WITH picked AS (
  SELECT id, state FROM results WHERE id = $1 OR source_id = $1 ORDER BY id FOR UPDATE
), swept AS (
  DELETE FROM result_chunks c USING picked p WHERE c.result_id = p.id
), gone AS (
  DELETE FROM results r USING picked p WHERE r.id = p.id
)
SELECT id, state FROM picked
"""

_LOCK_CONTEXT = """
SELECT id FROM contexts
WHERE id = (SELECT context_id FROM results WHERE id = $1 AND team_id = $2) FOR NO KEY UPDATE
"""
_LOCK_RESULT = "SELECT state FROM results WHERE id = $1 AND team_id = $2 FOR UPDATE"
# `retention` judges it again.
_MARK_UNUSED = "UPDATE contexts SET unused_since = now() WHERE id = $1"

# The chunks of a running result, from the one that holds the reader's offset on; none of a terminal
# result.
#
# A text may consist of several attempts, each of which continues the one before. `known` is how much of
# it the reader has: text of an earlier attempt counts as far as its successor kept it. The attempts are
# found one by one, so that each probe of the index reads only the rows that it returns.
_MAX_CHUNKS = 64
_TEXT_SINCE = f"""
SELECT i.place, r.state = 'pending' AS is_pending, r.attempt, k.known,
  coalesce(t.begins, 0) AS begins, coalesce(t.text, '') AS text,
  coalesce(t.chunks, 0) = {_MAX_CHUNKS} AS has_more, t.logprobs, t.completion_tokens
FROM unnest($1::uuid[], $2::int[], $3::bigint[], $4::bool[])
  WITH ORDINALITY AS i(id, attempt, after, continues, place)
JOIN results r ON r.id = i.id
CROSS JOIN LATERAL (
  SELECT CASE
    WHEN i.attempt = r.attempt THEN i.after
    WHEN i.continues AND i.attempt >= r.text_attempt THEN least(i.after, coalesce(
      (SELECT min(o."offset") FROM result_chunks o
       WHERE o.result_id = r.id AND o.attempt > i.attempt AND o.attempt <= r.attempt),
      (SELECT o."offset" + char_length(o.text) FROM result_chunks o
       WHERE o.result_id = r.id AND o.attempt BETWEEN r.text_attempt AND r.attempt
       ORDER BY o.attempt DESC, o."offset" DESC LIMIT 1), 0))
    ELSE 0 END AS known
) k
LEFT JOIN LATERAL (
  WITH RECURSIVE attempts(number) AS (
    SELECT coalesce(r.text_attempt, r.attempt)
    UNION ALL
    SELECT (SELECT n.attempt FROM result_chunks n
            WHERE n.result_id = r.id AND n.attempt > a.number AND n.attempt <= r.attempt
            ORDER BY n.attempt LIMIT 1)
    FROM attempts a WHERE a.number < r.attempt
  ), place AS MATERIALIZED (
    SELECT coalesce(max(b."offset"), 0) AS begins FROM attempts a CROSS JOIN LATERAL (
      SELECT o."offset" FROM result_chunks o
      WHERE o.result_id = r.id AND o.attempt = a.number AND o."offset" <= k.known
      ORDER BY o."offset" DESC LIMIT 1) b
  )
  SELECT min(c."offset") AS begins, string_agg(c.text, '' ORDER BY c."offset") AS text,
    count(*) AS chunks, max(c.completion_tokens) AS completion_tokens,
    -- Readers of tokens have whole chunks: their offset is at the end of a chunk.
    array_agg(c.logprobs ORDER BY c."offset") FILTER (WHERE c.logprobs IS NOT NULL
      AND c."offset" >= k.known) AS logprobs
  FROM (
    SELECT p.* FROM attempts a CROSS JOIN LATERAL (
      SELECT * FROM result_chunks c
      WHERE c.result_id = r.id AND c.attempt = a.number
        AND c."offset" >= (SELECT begins FROM place)
      ORDER BY c."offset" LIMIT {_MAX_CHUNKS}) p
    ORDER BY p."offset" LIMIT {_MAX_CHUNKS}
  ) c
) t ON r.state = 'pending'
"""

# Where the first attempt after $2 continued the text.
_CONTINUED_FROM = """
SELECT (e ->> 'continued_from')::bigint AS place
FROM results r, jsonb_array_elements(r.attempt_history) e
WHERE r.id = $1 AND (e ->> 'attempt')::int > $2 AND e ->> 'continued_from' IS NOT NULL
ORDER BY (e ->> 'attempt')::int LIMIT 1
"""

_ATTEMPTS = """
SELECT attempt_history, attempt, state, worker_id, started_at, finished_at, error_code,
       error_message, CASE WHEN worker_id IS NOT NULL AND text_attempt IS NOT NULL THEN (
         SELECT max(c."offset" + char_length(c.text)) FROM result_chunks c
         WHERE c.result_id = results.id AND c.attempt >= results.text_attempt
           AND c.attempt < results.attempt) END AS continued_from
FROM results WHERE id = $1 AND team_id = $2
"""


@dataclass(slots=True, frozen=True)
class StoredText:
    """The stored text of a result behind an offset; empty for a terminal one."""

    is_pending: bool
    attempt: int
    begins: int = 0  # its offset; less than the reader's if the reader's text was not kept
    text: str = ""
    has_more: bool = False
    logprobs: Sequence[str] = ()  # of its tokens, as JSON lists
    completion_tokens: int | None = None  # of the attempt up to the end of this text


class ResultStore:
    """Results of one team at a time; another team's do not exist: NotFoundError."""

    def __init__(self, database: Database, queue: JobQueue, settings: Settings) -> None:
        self._database = database
        self._queue = queue
        self._search = ResultSearch(database)
        seconds = settings.database_timeout_seconds
        self._reads: Batcher[UUID, asyncpg.Record | None] = Batcher(
            database, _read, max_items=_MAX_BATCH, retry_seconds=seconds
        )
        self._texts: Batcher[tuple[UUID, int, int, bool], StoredText | None] = Batcher(
            database, _read_texts, max_items=_MAX_BATCH, retry_seconds=seconds
        )

    async def get(self, team_id: str, result_id: UUID) -> ResultRow:
        row = await self._reads.submit(result_id)
        if row is not None and row["team_id"] == team_id and row["is_long"]:
            row = await self._database.fetchrow(_BY_ID, result_id)
        if row is None or row["team_id"] != team_id:
            raise result_not_found(result_id)
        return ResultRow.of(row)

    async def group(self, team_id: str, group_id: UUID) -> Sequence[ResultRow]:
        """The results of one request, in their order; a group has the id of its first result."""
        rows = await self._database.fetch(_BY_GROUP, group_id, team_id)
        return [ResultRow.of(row) for row in rows]

    async def text_since(
        self, result_id: UUID, attempt: int, offset: int, *, continues: bool
    ) -> StoredText:
        """The stored text of a pending result, in its present attempt.

        From `offset` on if that is `attempt`, otherwise from the start. `continues`: if the text of
        `attempt` was continued, from the end of the kept text, or `offset` if that is less. Raises
        NotFoundError.
        """
        stored = await self._texts.submit((result_id, attempt, offset, continues))
        if stored is None:
            raise result_not_found(result_id)
        return stored

    async def continued_from(self, result_id: UUID, attempt: int) -> int:
        """The length of an attempt's text that its successor kept; 0 where the history lacks it."""
        row = await self._database.fetchrow(_CONTINUED_FROM, result_id, attempt)
        return 0 if row is None else int(row["place"])

    async def partial_output(self, team_id: str, result_id: UUID) -> str:
        row = await self._database.fetchrow(_PARTIAL, result_id, team_id)
        return str(row[0]) if row else ""

    async def list(
        self,
        team_id: str,
        narrowed: ResultFilter,
        *,
        after: UUID | None,
        limit: int,
        full: bool,
        prompts: bool = False,
    ) -> Sequence[ListedResult]:
        """A page of results, newest first, beginning below the id `after`.

        Texts are cut after 1,000 characters unless `full`; `prompts` adds the `prompt_start`. Raises
        as `ResultSearch.ids` does.
        """
        columns = _LONG_COLUMNS if full else _SHORT_COLUMNS
        if prompts:
            columns += f", {_PROMPT_START}"
        if narrowed.words is not None:
            ids = await self._search.ids(team_id, narrowed, after=after, limit=limit)
            rows = await self._database.fetch(_FOUND.format(columns=columns), ids, team_id)
        else:
            page = page_of(team_id, narrowed, after)
            if page is None:
                return []
            rows = await self._database.fetch(page.select(columns, limit), *page.arguments)
        return [
            ListedResult(ResultRow.of(row), row["prompt_start"] if prompts else None)
            for row in rows
        ]

    async def newest_about(self, team_id: str, source_id: UUID, queue: str) -> ResultRow | None:
        row = await self._database.fetchrow(_NEWEST_ABOUT, source_id, team_id, queue)
        return None if row is None else ResultRow.of(row)

    async def attempts(self, team_id: str, result_id: UUID) -> AttemptsRow:
        row = await self._database.fetchrow(_ATTEMPTS, result_id, team_id)
        if row is None:
            raise result_not_found(result_id)
        return AttemptsRow(**row)

    async def request(self, team_id: str, result_id: UUID) -> SubmittedRequest:
        row = await self._database.fetchrow(_REQUEST, result_id, team_id)
        if row is None:
            raise result_not_found(result_id)
        return SubmittedRequest(**row)

    async def delete(self, team_id: str, result_id: UUID, *, force: bool) -> None:
        """Delete it with its attributions. Raises ConflictError while pending, unless `force`."""

        async def work(connection: Connection) -> list[UUID]:
            async with connection.transaction():
                # First the context, as everywhere: it may lose its last result.
                context_id = await connection.fetchval(_LOCK_CONTEXT, result_id, team_id)
                state = await connection.fetchval(_LOCK_RESULT, result_id, team_id)
                if state is None:
                    raise result_not_found(result_id)
                if state == "pending" and not force:
                    raise ConflictError(
                        "The result is pending. Wait, cancel it, or add ?force=true."
                    )
                deleted = await connection.fetch(_DELETE, result_id)
                await connection.execute(_MARK_UNUSED, context_id)
                return [row["id"] for row in deleted if row["state"] == "pending"]

        if stopped := await self._database.run(work):
            await self._queue.notify_stopped(stopped)


def result_not_found(result_id: UUID) -> NotFoundError:
    return NotFoundError(f"There is no result {result_id}.")


async def _read(
    connection: Connection, ids: Sequence[UUID], _resent: bool
) -> Sequence[asyncpg.Record | None]:
    rows = {row["id"]: row for row in await connection.fetch(_BY_IDS, ids)}
    return [rows.get(identifier) for identifier in ids]


async def _read_texts(
    connection: Connection, places: Sequence[tuple[UUID, int, int, bool]], _resent: bool
) -> Sequence[StoredText | None]:
    rows = await connection.fetch(
        _TEXT_SINCE, *(list(column) for column in zip(*places, strict=True))
    )
    found: list[StoredText | None] = [None] * len(places)
    for row in rows:
        found[row["place"] - 1] = StoredText(
            row["is_pending"],
            row["attempt"],
            row["known"],
            row["text"][max(0, row["known"] - row["begins"]) :],
            row["has_more"],
            row["logprobs"] or (),
            row["completion_tokens"],
        )
    return found
