"""Reading results: by id (concurrent readers share a statement), in pages, with their attempts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import asyncpg

from app.database import Connection, Database
from app.errors import ConflictError, NotFoundError
from app.group_commit import Lane
from app.ids import lowest_id
from app.job_queue import JobQueue
from app.settings import Settings

_MAX_BATCH = 500
LIST_TEXT_CHARACTERS = 1000

_COLUMNS = """id, team_id, context_id, model_name, model_version, state, {output} AS output,
  error_code, error_message, error_retryable, finish_reason, parameters, prompt_tokens,
  completion_tokens, attempt, cancel_requested_at, started_at, first_token_at, finished_at,
  metadata, logprobs, priority, group_id"""

_BY_IDS = f"SELECT {_COLUMNS.format(output='output')} FROM results WHERE id = ANY($1::uuid[])"

_PARTIAL = """
SELECT coalesce(string_agg(c.text, '' ORDER BY c."offset"), '') FROM results r
LEFT JOIN result_chunks c ON c.result_id = r.id AND c.attempt = r.attempt
WHERE r.id = $1 AND r.team_id = $2
"""

_ATTEMPTS = """
SELECT attempt_history, attempt, state, worker_id, started_at, finished_at, error_code,
       error_message FROM results WHERE id = $1 AND team_id = $2
"""


@dataclass(slots=True, frozen=True)
class ResultFilter:
    """What a list is narrowed to; None leaves a condition out."""

    state: str | None = None
    model_name: str | None = None
    context_id: UUID | None = None
    error_code: str | None = None
    retryable: bool | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


class ResultStore:
    """Read and delete results of one team at a time."""

    def __init__(self, database: Database, queue: JobQueue, settings: Settings) -> None:
        self._database = database
        self._queue = queue
        self._reads: Lane[UUID, asyncpg.Record | None] = Lane(
            database,
            _read,
            max_items=_MAX_BATCH,
            retry_seconds=settings.database_timeout_seconds,
        )

    async def get(self, team_id: str, result_id: UUID) -> asyncpg.Record:
        """Read one result. Raises NotFoundError, for another team's as well."""
        row = await self._reads.submit(result_id)
        if row is None or row["team_id"] != team_id:
            raise result_not_found(result_id)
        return row

    async def partial_output(self, team_id: str, result_id: UUID) -> str:
        """The text of a running result that its worker has stored so far."""
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
    ) -> Sequence[asyncpg.Record]:
        """A page of results, newest first, beginning below the id `after`.

        Texts are cut after 1,000 characters unless `full`.
        """
        conditions = ["team_id = $1"]
        arguments: list[object] = [team_id]

        def add(condition: str, value: object) -> None:
            if value is not None:
                arguments.append(value)
                conditions.append(condition.format(f"${len(arguments)}"))

        add("id < {}", after)
        # Literal, so that the planner may use the partial indexes.
        if narrowed.state is not None:
            conditions.append(
                {"pending": "state = 'pending'", "failed": "state = 'failed'"}.get(
                    narrowed.state, "state = 'completed'"
                )
            )
        elif narrowed.error_code is not None or narrowed.retryable is not None:
            conditions.append("state = 'failed'")
        add("model_name = {}", narrowed.model_name)
        add("context_id = {}", narrowed.context_id)
        add("error_code = {}", narrowed.error_code)
        add("error_retryable = {}", narrowed.retryable)
        add("id >= {}", narrowed.created_after and lowest_id(narrowed.created_after))
        add("id < {}", narrowed.created_before and lowest_id(narrowed.created_before))
        output = "output" if full else f"left(output, {LIST_TEXT_CHARACTERS})"
        query = (
            f"SELECT {_COLUMNS.format(output=output)} FROM results "
            f"WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT {int(limit)}"
        )
        return await self._database.fetch(query, *arguments)

    async def attempts(self, team_id: str, result_id: UUID) -> asyncpg.Record:
        """The attempt history and the present attempt. Raises NotFoundError."""
        row = await self._database.fetchrow(_ATTEMPTS, result_id, team_id)
        if row is None:
            raise result_not_found(result_id)
        return row

    async def delete(self, team_id: str, result_id: UUID, *, force: bool) -> None:
        """Delete a result. Raises ConflictError while it is pending, unless `force`."""

        async def work(connection: Connection) -> bool:
            async with connection.transaction():
                state = await connection.fetchval(
                    "SELECT state FROM results WHERE id = $1 AND team_id = $2 FOR UPDATE",
                    result_id,
                    team_id,
                )
                if state is None:
                    raise result_not_found(result_id)
                if state == "pending" and not force:
                    raise ConflictError(
                        "The result is pending. Wait, cancel it, or add ?force=true."
                    )
                await connection.execute(
                    "DELETE FROM result_chunks WHERE result_id = $1", result_id
                )
                await connection.execute("DELETE FROM results WHERE id = $1", result_id)
            return bool(state == "pending")

        if await self._database.run(work):
            await self._queue.tell_stopped([result_id])


def result_not_found(result_id: UUID) -> NotFoundError:
    return NotFoundError(f"There is no result {result_id}.")


async def _read(
    connection: Connection, ids: Sequence[UUID], _resent: bool
) -> Sequence[asyncpg.Record | None]:
    rows = {row["id"]: row for row in await connection.fetch(_BY_IDS, ids)}
    return [rows.get(identifier) for identifier in ids]
