"""Jobs as their teams see them: create, read, list, close, open again, cancel and delete.

Counts are those of `job_progress` and of the events that it does not have yet, read in one statement:
they are exact, and no row is counted.
"""

from collections.abc import Sequence
from dataclasses import fields
from uuid import UUID

import asyncpg
import orjson

from app.core.database import Connection, Database, lock_team
from app.core.errors import (
    ConflictError,
    JobClosedError,
    LimitError,
    NotFoundError,
    ServiceError,
)
from app.core.group_commit import Batcher
from app.core.ids import HIGHEST_ID, LOWEST_ID
from app.core.settings import Settings
from app.queue.job_rows import TakenRow, find_rows
from app.results.jobs.rows import Job, JobDefaults, JobState, NewJob, add_counts

_RETRY_SECONDS = 10
_MAX_BATCH = 1000
_MAX_KNOWN = 10_000  # jobs whose defaults a process keeps
_NEW = tuple(field.name for field in fields(NewJob))

_BY_KEY = "SELECT id FROM jobs WHERE team_id = $1 AND key = $2 AND deleted_at IS NULL"
_COUNT = """
SELECT count(*) FROM (
  SELECT FROM jobs WHERE team_id = $1 AND ended_at IS NULL AND deleted_at IS NULL AND id <> $2
  LIMIT $3) open
"""
_CREATE = f"""
WITH created AS (
  INSERT INTO jobs ({", ".join(_NEW)})
  VALUES ({", ".join(f"${place}" for place in range(1, len(_NEW) + 1))})
  ON CONFLICT (id) DO NOTHING RETURNING id
)
INSERT INTO job_progress (job_id) SELECT id FROM created
"""

_DEFAULTS = """
SELECT id, team_id, priority, deadline_seconds FROM jobs
WHERE id = ANY($1::uuid[]) AND deleted_at IS NULL
"""

# New rows have no end: they are counted under the empty name.
_JOBS = """
SELECT j.*, p.rows, p.last_place, p.began_place, p.ended,
  extract(epoch FROM now() - p.began_at)::float8 AS running_seconds,
  p.prompt_tokens + e.prompt_tokens AS prompt_tokens,
  p.completion_tokens + e.completion_tokens AS completion_tokens, e.recent
FROM ({jobs}) j
CROSS JOIN LATERAL (SELECT * FROM job_progress WHERE job_id = j.id OFFSET 0) p
CROSS JOIN LATERAL (
  SELECT jsonb_object_agg(ended_as, rows) AS recent,
    coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
    coalesce(sum(completion_tokens), 0)::bigint AS completion_tokens
  FROM (
    SELECT coalesce(ended_as, '') AS ended_as, sum(rows) AS rows,
      sum(prompt_tokens) AS prompt_tokens, sum(completion_tokens) AS completion_tokens
    FROM job_events WHERE job_id = j.id GROUP BY 1) g) e
ORDER BY j.id DESC
"""
_COLUMNS = ", ".join((*_NEW, "closed_at", "cancel_requested_at", "ended_at"))
_GET = _JOBS.format(
    jobs=f"SELECT {_COLUMNS} FROM jobs WHERE id = $1 AND team_id = $2 AND deleted_at IS NULL"
)
# Rows, not equalities: only an index that begins with the team has this order.
_LIST = _JOBS.format(
    jobs=f"""
  SELECT {_COLUMNS} FROM jobs
  WHERE (team_id, id) >= ($1, $2) AND (team_id, id) < ($1, $3) AND deleted_at IS NULL {{and_state}}
  ORDER BY team_id DESC, id DESC LIMIT $4"""
)
_LISTS: dict[JobState | None, str] = {
    None: _LIST.format(and_state=""),
    "open": _LIST.format(and_state="AND closed_at IS NULL"),
    "closed": _LIST.format(and_state="AND closed_at IS NOT NULL AND ended_at IS NULL"),
    "ended": _LIST.format(and_state="AND ended_at IS NOT NULL"),
}

# It waits for the statements that store rows of the job, which lock it too; later ones see the change.
_LOCK = """
SELECT closed_at, ended_at, cancel_requested_at FROM jobs
WHERE id = $1 AND team_id = $2 AND deleted_at IS NULL FOR UPDATE
"""
_HAS_PENDING = """
SELECT (SELECT result_id FROM job_rows
        WHERE (job_id, result_id) > ($1, $2) AND (job_id, result_id) < ($1, $3) AND place IS NULL
        ORDER BY job_id, result_id LIMIT 1) IS NOT NULL
"""
_OPEN = "UPDATE jobs SET closed_at = NULL, ended_at = NULL WHERE id = $1"
# Retention keeps an open job from its last change on. Counts are locked before the job, as by `JobKeeper`.
_CHANGE = """
UPDATE job_progress p SET changed_at = now(),
  began_at = CASE WHEN j.ended_at IS NULL THEN p.began_at ELSE now() END,
  began_place = CASE WHEN j.ended_at IS NULL THEN p.began_place ELSE p.last_place END
FROM jobs j WHERE j.id = $1 AND j.team_id = $2 AND p.job_id = j.id
"""
_CLOSE = "UPDATE jobs SET closed_at = now() WHERE id = $1 AND closed_at IS NULL"
_CANCEL = """
UPDATE jobs SET closed_at = coalesce(closed_at, now()), ended_at = NULL,
  cancel_requested_at = coalesce(cancel_requested_at, now())
WHERE id = $1
"""
_FORGET_CANCEL = "UPDATE jobs SET cancel_requested_at = NULL WHERE id = $1"
_DELETE = "UPDATE jobs SET deleted_at = now() WHERE id = $1"
# So that its end is looked for.
_TOUCH = "INSERT INTO job_events (job_id, rows) VALUES ($1, 0)"


class JobStore:
    """Jobs of one team at a time; another team's do not exist: NotFoundError."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._max_open = settings.team_max_jobs
        self._known: dict[UUID, JobDefaults] = {}
        self._finds: Batcher[tuple[UUID, str], TakenRow | None] = Batcher(
            database,
            find_rows,
            max_items=_MAX_BATCH,
            retry_seconds=settings.database_timeout_seconds,
        )

    async def create(self, new: NewJob) -> tuple[Job, bool]:
        """Create it, or find it by its key (False). Raises LimitError."""
        identifier = await self._database.run(
            lambda connection: _create(connection, new, self._max_open)
        )
        return await self.get(new.team_id, identifier), identifier == new.id

    async def get(self, team_id: str, job_id: UUID) -> Job:
        row = await self._database.fetchrow(_GET, job_id, team_id)
        if row is None:
            raise job_not_found(job_id)
        return _to_job(row)

    async def list(
        self, team_id: str, *, state: JobState | None, after: UUID | None, limit: int
    ) -> Sequence[Job]:
        """Jobs, newest first, beginning below the id `after`."""
        arguments = (team_id, LOWEST_ID, after or HIGHEST_ID, limit)
        return [_to_job(row) for row in await self._database.fetch(_LISTS[state], *arguments)]

    async def defaults(
        self, team_id: str, ids: Sequence[UUID]
    ) -> dict[UUID, JobDefaults | NotFoundError]:
        """The defaults of jobs, or the error in their place."""
        if unknown := [one for one in set(ids) if one not in self._known]:
            if len(self._known) + len(unknown) > _MAX_KNOWN:
                self._known.clear()
            for row in await self._database.fetch(_DEFAULTS, unknown):
                defaults = JobDefaults(row["team_id"], row["priority"], row["deadline_seconds"])
                self._known[row["id"]] = defaults
        return {
            one: found
            if (found := self._known.get(one)) is not None and found.team_id == team_id
            else job_not_found(one)
            for one in set(ids)
        }

    async def find_row(self, job_id: UUID, key: str) -> TakenRow | None:
        """The row under a key; the job is known to be the team's."""
        return await self._finds.submit((job_id, key))

    async def refusal(self, team_id: str, job_id: UUID) -> ServiceError | None:
        """The reason why a job takes no new row; None if it takes some."""
        try:
            job = await self.get(team_id, job_id)
        except NotFoundError as error:
            return error
        if job.closed_at is not None:
            return JobClosedError(
                f"Job {job_id} was closed at {job.closed_at:%Y-%m-%dT%H:%M:%SZ}: it takes no new rows. "
                "Open it again (POST /jobs/{id}/open), or send them to a new job."
            )
        if job.rows >= job.max_rows:
            return LimitError(
                f"Job {job_id} has {job.max_rows:,} rows, as many as a job may have "
                "(LLM_MAX_JOB_ROWS). Send further rows to another job.",
                extra={"limit": "max_job_rows", "allowed": job.max_rows, "position": None},
            )
        return None

    # --- changes of a job -------------------------------------------------------------------------

    async def open(self, team_id: str, job_id: UUID) -> Job:
        """Take rows again that it lacks; idempotent.

        Raises ConflictError for a cancelled job, and LimitError.
        """

        async def work(connection: Connection) -> None:
            async with connection.transaction():
                await lock_team(connection, "jobs", team_id)
                await connection.execute(_CHANGE, job_id, team_id)
                locked = await _lock(connection, team_id, job_id)
                if locked["cancel_requested_at"] is not None:
                    raise ConflictError(
                        "The job was cancelled. Retry its rows with the code `cancelled`, then open it."
                    )
                if locked["ended_at"] is not None:
                    await _check_room(connection, team_id, job_id, self._max_open)
                if locked["closed_at"] is not None:
                    await connection.execute(_OPEN, job_id)

        await self._database.run(work)
        return await self.get(team_id, job_id)

    async def close(self, team_id: str, job_id: UUID) -> Job:
        """Take no further rows; idempotent."""

        async def work(connection: Connection) -> None:
            async with connection.transaction():
                locked = await _lock(connection, team_id, job_id)
                if locked["closed_at"] is None:
                    await connection.execute(_CLOSE, job_id)
                    await connection.execute(_TOUCH, job_id)

        await self._database.run(work)
        return await self.get(team_id, job_id)

    async def cancel(self, team_id: str, job_id: UUID) -> Job:
        """Close it, and have its pending rows cancelled (`JobKeeper`); idempotent."""

        async def work(connection: Connection) -> None:
            async with connection.transaction():
                locked = await _lock(connection, team_id, job_id)
                if locked["ended_at"] is None or await _has_pending(connection, job_id):
                    await connection.execute(_CANCEL, job_id)
                    await connection.execute(_TOUCH, job_id)

        await self._database.run(work)
        return await self.get(team_id, job_id)

    async def resume(self, team_id: str, job_id: UUID) -> None:
        """Let an ended job that was cancelled take retries.

        Raises ConflictError while its rows are being cancelled.
        """

        async def work(connection: Connection) -> None:
            async with connection.transaction():
                locked = await _lock(connection, team_id, job_id)
                if locked["cancel_requested_at"] is None:
                    return
                if await _has_pending(connection, job_id):
                    raise ConflictError(
                        "The job's rows are being cancelled. Retry them when the job has ended."
                    )
                await connection.execute(_FORGET_CANCEL, job_id)

        await self._database.run(work)

    async def delete(self, team_id: str, job_id: UUID) -> None:
        """Delete an ended job and its keys; results stay. Raises ConflictError before its end."""

        async def work(connection: Connection) -> None:
            async with connection.transaction():
                locked = await _lock(connection, team_id, job_id)
                if locked["ended_at"] is None or await _has_pending(connection, job_id):
                    raise ConflictError("The job has not ended. Cancel it, and wait for its end.")
                await connection.execute(_DELETE, job_id)

        await self._database.run(work)
        self._known.pop(job_id, None)


async def _create(connection: Connection, new: NewJob, max_open: int) -> UUID:
    """The id of the committed job, or of the first one under its key. Idempotent."""
    async with connection.transaction():
        await lock_team(connection, "jobs", new.team_id)
        if new.key is not None:
            known: UUID | None = await connection.fetchval(_BY_KEY, new.team_id, new.key)
            if known is not None:
                return known
        await _check_room(connection, new.team_id, new.id, max_open)
        await connection.execute(_CREATE, *(getattr(new, name) for name in _NEW))
    return new.id


async def _check_room(connection: Connection, team_id: str, job_id: UUID, max_open: int) -> None:
    """Raise LimitError if as many other jobs of the team as may be open have not ended."""
    if max_open and await connection.fetchval(_COUNT, team_id, job_id, max_open) >= max_open:
        raise LimitError(
            f"{max_open} jobs of your team have not ended, as many as may be open "
            "(LLM_TEAM_MAX_JOBS). Close jobs that get no more rows, or cancel one.",
            headers={"Retry-After": str(_RETRY_SECONDS)},
            extra={"limit": "max_jobs", "allowed": max_open, "position": None},
        )


async def _lock(connection: Connection, team_id: str, job_id: UUID) -> asyncpg.Record:
    row = await connection.fetchrow(_LOCK, job_id, team_id)
    if row is None:
        raise job_not_found(job_id)
    return row


async def _has_pending(connection: Connection, job_id: UUID) -> bool:
    has_pending: bool = await connection.fetchval(_HAS_PENDING, job_id, LOWEST_ID, HIGHEST_ID)
    return has_pending


def _to_job(row: asyncpg.Record) -> Job:
    members = dict(row)
    recent = orjson.loads(members.pop("recent") or "{}")
    rows = members.pop("rows") + recent.pop("", 0)
    ended = add_counts(orjson.loads(members.pop("ended")), recent.items())
    return Job(**members, rows=rows, ended=ended, is_settled=row["recent"] is None)


def job_not_found(job_id: UUID) -> NotFoundError:
    return NotFoundError(f"There is no job {job_id}.")
