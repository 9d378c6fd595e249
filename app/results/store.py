"""Reading results: by id (concurrent readers share a statement), in pages, with their attempts."""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from uuid import UUID

import asyncpg

from app.core.byte_budget import read_within
from app.core.database import Connection, Database
from app.core.errors import ConflictError, NotFoundError
from app.core.fair_share import in_turns
from app.core.group_commit import Batcher
from app.core.settings import Settings
from app.queue.finish import READ_COLUMNS
from app.queue.job_queue import JobQueue
from app.results.pages import LIST_COLUMNS, ResultFilter, walks_of
from app.results.rows import AttemptsRow, ListedResult, ResultRow, SubmittedRequest
from app.results.search import ResultSearch
from app.results.search_policy import SearchPolicy
from app.results.sizes import (
    LONG_BYTES,
    PageSizes,
    SizedPage,
    following_of,
    json_bytes,
    loaded_bytes,
    loaded_bytes_of_all,
    read_page,
    text_bytes,
    unless_long,
    vector_bytes,
)
from app.results.stored_text import StoredText, read_texts
from app.results.usage import ledger

_MAX_BATCH = 500
LIST_TEXT_CHARACTERS = 1000
PROMPT_START_CHARACTERS = 200

_LONG_COLUMNS = ", ".join(LIST_COLUMNS.values())
_SHORTENED = {
    # An attribution is not a text: half of its JSON is useless.
    # One character more shows that the text is cut.
    "output": f"CASE kind WHEN 'generation' THEN left(output, {LIST_TEXT_CHARACTERS + 1}) END AS output",
    # Many times as long as the text.
    "logprobs": "NULL::jsonb AS logprobs",
    "prompt_logprobs": "NULL::text AS prompt_logprobs",
    "vector": "NULL::bytea AS vector",
}
_SHORT_COLUMNS = ", ".join((LIST_COLUMNS | _SHORTENED).values())
_REST = f"{json_bytes('parameters')} + {json_bytes('metadata')} + {text_bytes('error_message')}"
_SHORT_SIZE = f"id, least({text_bytes('output')}, {4 * LIST_TEXT_CHARACTERS}) + {_REST} AS size"
_LONG_SIZE = f"id, {text_bytes('output')} + {json_bytes('logprobs')} + {text_bytes('prompt_logprobs')} + {vector_bytes('vector')} + {_REST} AS size"

# Only the start of a text is read. Messages are read whole, so long ones are left out; the last message
# represents a chat.
_PROMPT_START = f"""
(SELECT CASE WHEN c.erased_at IS NOT NULL THEN NULL
  WHEN c.content IS NOT NULL THEN left(c.content, {PROMPT_START_CHARACTERS})
  WHEN pg_column_size(c.messages) <= {LONG_BYTES}
    THEN left(c.messages -> -1 ->> 'content', {PROMPT_START_CHARACTERS})
  END FROM contexts c WHERE c.id = results.context_id) AS prompt_start
"""

# Readers of short results share a statement. A long text is fetched separately, so that they do not
# wait for it, within the byte budget.
_SIZES = {
    "output": text_bytes("output"),
    "logprobs": json_bytes("logprobs"),
    "prompt_logprobs": text_bytes("prompt_logprobs"),
    "vector": vector_bytes("vector"),
    "request": json_bytes("request"),
    # Long where a prompt was sent as token ids.
    "parameters": json_bytes("parameters"),
}
_SIZE = " + ".join(_SIZES.values())
_SHORT_ONLY = ", ".join(
    unless_long(column, _SIZES[column]) if column in _SIZES else column for column in READ_COLUMNS
)
_BY_IDS = f"SELECT {_SHORT_ONLY}, {_SIZE} AS size FROM results WHERE id = ANY($1::uuid[])"
_BY_ID = f"SELECT {', '.join(READ_COLUMNS)} FROM results WHERE id = $1"

_BY_GROUP = f"SELECT {', '.join(READ_COLUMNS)} FROM results WHERE group_id = $1 AND team_id = $2 ORDER BY id"
_GROUP_SIZES = f"SELECT {_SIZE} AS size FROM results WHERE group_id = $1 AND team_id = $2"

_FOUND = """
SELECT {columns} FROM results WHERE id = ANY($1::uuid[]) AND team_id = $2 ORDER BY id DESC
"""

_REQUEST = f"""
SELECT {", ".join(field.name for field in fields(SubmittedRequest))}
FROM results WHERE id = $1 AND team_id = $2
"""

_REQUEST_SIZE = f"""
SELECT {text_bytes("prompt")} + {text_bytes("output")} AS size
FROM results WHERE id = $1 AND team_id = $2
"""

_NEWEST_ABOUT = """
SELECT id FROM results
WHERE source_id = $1 AND team_id = $2 AND model_name = $3 ORDER BY id DESC LIMIT 1
"""

_PARTIAL = """
SELECT coalesce(string_agg(c.text, '' ORDER BY c."offset"), '') FROM results r
LEFT JOIN result_chunks c ON c.result_id = r.id
  AND c.attempt BETWEEN coalesce(r.text_attempt, r.attempt) AND r.attempt
WHERE r.id = $1 AND r.team_id = $2
"""

# In the order of ids, like every statement that locks several.
_LOCK_ALL = """
  SELECT id, state FROM results WHERE id = $1 OR source_id = $1 ORDER BY id FOR UPDATE
"""
_DELETE = f"""
WITH picked AS ({_LOCK_ALL}), swept AS (
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


class ResultStore:
    """Results of one team at a time; another team's do not exist: NotFoundError."""

    def __init__(self, database: Database, queue: JobQueue, settings: Settings) -> None:
        self._database = database
        self._queue = queue
        self._search = ResultSearch(database, SearchPolicy(database, settings))
        seconds = settings.database_timeout_seconds
        self._reads: Batcher[UUID, asyncpg.Record | None] = Batcher(
            database, _read, max_items=_MAX_BATCH, retry_seconds=seconds
        )
        self._texts: Batcher[tuple[UUID, int, int, bool], StoredText | None] = Batcher(
            database, read_texts, max_items=_MAX_BATCH, retry_seconds=seconds
        )

    async def get(self, team_id: str, result_id: UUID) -> ResultRow:
        row, _ = await self.get_charged(team_id, result_id)
        return row

    async def get_charged(self, team_id: str, result_id: UUID) -> tuple[ResultRow, int]:
        """A result, and the charge for its texts if they are long. Raises MemoryBusyError."""
        row, charge = await self._reads.submit(result_id), 0
        if row is not None and row["team_id"] == team_id and row["size"] > LONG_BYTES:
            row, charge = await read_within(
                row["size"], partial(self._database.fetchrow, _BY_ID, result_id), loaded_bytes
            )
        if row is None or row["team_id"] != team_id:
            raise result_not_found(result_id)
        return ResultRow.of(row), charge

    async def group(self, team_id: str, group_id: UUID) -> Sequence[ResultRow]:
        """The results of one request, in their order; a group has the id of its first result."""
        sizes = await self._database.fetch(_GROUP_SIZES, group_id, team_id)
        rows, _ = await read_within(
            sum(row["size"] for row in sizes),
            partial(self._database.fetch, _BY_GROUP, group_id, team_id),
            loaded_bytes_of_all,
        )
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
    ) -> SizedPage[ListedResult]:
        """A page of results, newest first, beginning below the id `after`.

        Texts are cut after 1,000 characters unless `full`; `prompts` adds the `prompt_start`. Raises
        MemoryBusyError, and as `ResultSearch.ids` does.
        """
        columns = _LONG_COLUMNS if full else _SHORT_COLUMNS
        if prompts:
            columns += f", {_PROMPT_START}"
        sizes = await self._sizes(team_id, narrowed, after, limit, full=full)
        query = _FOUND.format(columns=columns)
        page = await read_page(sizes, lambda ids: self._database.fetch(query, ids, team_id))
        listed = [
            _to_listed(row, row["prompt_start"] if prompts else None, full=full)
            async for row in in_turns(page.rows)
        ]
        return SizedPage(listed, page.following)

    async def _sizes(
        self, team_id: str, narrowed: ResultFilter, after: UUID | None, limit: int, *, full: bool
    ) -> PageSizes:
        columns = _LONG_SIZE if full else _SHORT_SIZE
        walks = walks_of(team_id, narrowed, after)
        if narrowed.words is None and len(walks) == 1:
            query = walks[0].select(columns, limit)
            return PageSizes.of(await self._database.fetch(query, *walks[0].arguments), limit)
        ids = await self._search.ids(team_id, narrowed, after=after, limit=limit)
        rows = await self._database.fetch(_FOUND.format(columns=columns), ids, team_id)
        return PageSizes(rows, following_of(ids, limit))

    async def newest_about(self, team_id: str, source_id: UUID, queue: str) -> ResultRow | None:
        row = await self._database.fetchrow(_NEWEST_ABOUT, source_id, team_id, queue)
        return None if row is None else await self.get(team_id, row["id"])

    async def attempts(self, team_id: str, result_id: UUID) -> AttemptsRow:
        row = await self._database.fetchrow(_ATTEMPTS, result_id, team_id)
        if row is None:
            raise result_not_found(result_id)
        return AttemptsRow(**row)

    async def request(self, team_id: str, result_id: UUID) -> SubmittedRequest:
        size = await self._database.fetchrow(_REQUEST_SIZE, result_id, team_id)
        row, _ = await read_within(
            size["size"] if size else 0,
            partial(self._database.fetchrow, _REQUEST, result_id, team_id),
            loaded_bytes,
        )
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
                locked = await connection.fetch(_LOCK_ALL, result_id)
                ids = [row["id"] for row in locked]
                await ledger.settle(connection, ids)
                await ledger.add_deleted(connection, ids)
                deleted = await connection.fetch(_DELETE, result_id)
                await connection.execute(_MARK_UNUSED, context_id)
                return [row["id"] for row in deleted if row["state"] == "pending"]

        if stopped := await self._database.run(work):
            await self._queue.notify_stopped(stopped)


def _to_listed(record: asyncpg.Record, prompt_start: str | None, *, full: bool) -> ListedResult:
    row = ResultRow.of(record)
    if full:
        return ListedResult(row, prompt_start, truncated=False)
    if row.kind != "generation":
        has_output = row.state == "completed" and row.erased_at is None
        return ListedResult(row, prompt_start, truncated=has_output)
    truncated = len(row.text) > LIST_TEXT_CHARACTERS
    if truncated:
        row = row._replace(output=row.text[:LIST_TEXT_CHARACTERS])
    return ListedResult(row, prompt_start, truncated=truncated)


def result_not_found(result_id: UUID) -> NotFoundError:
    return NotFoundError(f"There is no result {result_id}.")


async def _read(
    connection: Connection, ids: Sequence[UUID], _resent: bool
) -> Sequence[asyncpg.Record | None]:
    rows = {row["id"]: row for row in await connection.fetch(_BY_IDS, ids)}
    return [rows.get(identifier) for identifier in ids]
