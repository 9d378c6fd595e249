"""The table `model_downloads`: every statement about it.

A worker claims downloads that are due, each under an exclusive lease, and renews the lease with the
progress. A claim counts the attempts; each statement of the worker names its attempt, so that none has an
effect after another claim or after the download is cancelled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import asyncpg

from app.core.database import Connection, Database, lock_team
from app.core.errors import ConflictError, LimitError, NotFoundError
from app.core.ids import HIGHEST_ID, LOWEST_ID, new_id
from app.core.listener import LAUNCHES

DownloadState = Literal["queued", "running", "completed", "failed", "cancelled"]

MAX_OPEN = 100  # downloads of a team that have not ended
MAX_FAILURES = 10  # attempts without progress: about half an hour
_PAUSE_SECONDS = 15.0
_MAX_PAUSE_SECONDS = 300.0
_LIMIT_RETRY_SECONDS = 60


@dataclass(slots=True, frozen=True)
class ModelDownload:
    """A row of the table. `done_bytes`: bytes of the snapshot that are there."""

    id: UUID
    profile: str
    model: str
    revision: str
    state: DownloadState
    reason: str
    attempt: int
    failures: int
    done_bytes: int
    total_bytes: int | None
    commit: str | None
    started_at: datetime | None
    ended_at: datetime | None


_COLUMNS = ", ".join(f"d.{one.name}" for one in fields(ModelDownload))

_CREATE = f"""
WITH made AS (
  INSERT INTO model_downloads AS d (id, team_id, profile, model, revision)
  VALUES ($1, $2, $3, $4, $5)
  ON CONFLICT DO NOTHING RETURNING {_COLUMNS}
)
SELECT made.*, pg_notify('{LAUNCHES}', '') FROM made
"""
_OWN = f"SELECT {_COLUMNS} FROM model_downloads d WHERE id = $1 AND team_id = $2"
_OPEN = "SELECT count(*) FROM model_downloads WHERE team_id = $1 AND ended_at IS NULL"
_LIST = f"""
SELECT {_COLUMNS} FROM model_downloads d
WHERE (team_id, id) >= ($1, $2) AND (team_id, id) < ($1, $3)
ORDER BY team_id DESC, id DESC LIMIT $4
"""
_CANCEL = """
UPDATE model_downloads SET state = 'cancelled', reason = 'cancelled on request', ended_at = now()
WHERE id = $1 AND team_id = $2 AND ended_at IS NULL
"""

# Teams take turns by the number of their running downloads. A model that another team's download fetches
# to the same profile waits.
_CLAIM = f"""
WITH running AS (
  SELECT id, team_id, profile, model FROM model_downloads
  WHERE ended_at IS NULL AND state = 'running' AND lease_expires_at > now()
), due AS (
  SELECT id FROM model_downloads m
  WHERE ended_at IS NULL AND profile = ANY($1::text[]) AND next_attempt_at <= now()
    AND (lease_expires_at IS NULL OR lease_expires_at <= now())
    AND NOT EXISTS (SELECT FROM running r WHERE (r.profile, r.model) = (m.profile, m.model))
  ORDER BY (SELECT count(*) FROM running r WHERE r.team_id = m.team_id), next_attempt_at
  LIMIT 1 FOR UPDATE OF m SKIP LOCKED
)
UPDATE model_downloads d SET state = 'running', reason = '', attempt = attempt + 1,
  started_at = coalesce(started_at, now()), lease_expires_at = now() + make_interval(secs => $2)
FROM due WHERE d.id = due.id RETURNING {_COLUMNS}
"""
_HELD = "id = $1 AND attempt = $2 AND state = 'running'"
_RENEW = f"""
UPDATE model_downloads SET done_bytes = greatest(done_bytes, $3), total_bytes = coalesce($4, total_bytes),
  failures = CASE WHEN $3 > done_bytes THEN 0 ELSE failures END,
  lease_expires_at = now() + make_interval(secs => $5)
WHERE {_HELD} RETURNING id
"""
_RETRY = f"""
UPDATE model_downloads SET
  state = CASE WHEN failures < {MAX_FAILURES} - 1 THEN 'queued' ELSE 'failed' END,
  reason = CASE WHEN failures < {MAX_FAILURES} - 1 THEN left($3, 2000)
    ELSE left($3, 1900) || ' ({MAX_FAILURES} attempts without progress)' END,
  ended_at = CASE WHEN failures < {MAX_FAILURES} - 1 THEN NULL ELSE now() END,
  failures = failures + 1, lease_expires_at = NULL,
  next_attempt_at = now() + make_interval(secs => least({_PAUSE_SECONDS} * 2.0 ^ failures, {_MAX_PAUSE_SECONDS}))
WHERE {_HELD}
"""
_RELEASE = f"""
UPDATE model_downloads SET state = 'queued', lease_expires_at = NULL
WHERE {_HELD}
"""
_COMPLETE = f"""
UPDATE model_downloads SET state = 'completed', commit = $3, done_bytes = $4, total_bytes = $4,
  ended_at = now(), lease_expires_at = NULL
WHERE {_HELD}
"""
_FAIL = f"""
UPDATE model_downloads SET state = 'failed', reason = left($3, 2000), ended_at = now(),
  lease_expires_at = NULL
WHERE {_HELD}
"""


class DownloadStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    # --- for the team ---------------------------------------------------------------------------

    async def create(self, team_id: str, profile: str, model: str, revision: str) -> ModelDownload:
        """Store a download; a worker runs it. Raises ConflictError and LimitError."""
        identifier = new_id()

        async def insert(connection: Connection) -> asyncpg.Record:
            async with connection.transaction():
                await lock_team(connection, "downloads", team_id)
                if row := await connection.fetchrow(_OWN, identifier, team_id):
                    return row
                if await connection.fetchval(_OPEN, team_id) >= MAX_OPEN:
                    raise LimitError(
                        f"The team has {MAX_OPEN} downloads that have not ended: wait for some, or "
                        "cancel them.",
                        headers={"Retry-After": str(_LIMIT_RETRY_SECONDS)},
                        extra={"limit": "max_downloads", "allowed": MAX_OPEN, "position": None},
                    )
                row = await connection.fetchrow(
                    _CREATE, identifier, team_id, profile, model, revision
                )
            if row is None:
                raise ConflictError(
                    f"A download of {model} to {profile} has not ended: wait for its end, or cancel it."
                )
            return row

        return ModelDownload(**_members(await self._database.run(insert)))

    async def list(
        self, team_id: str, *, after: UUID | None, limit: int
    ) -> Sequence[ModelDownload]:
        rows = await self._database.fetch(_LIST, team_id, LOWEST_ID, after or HIGHEST_ID, limit)
        return [ModelDownload(**_members(row)) for row in rows]

    async def get(self, team_id: str, download_id: UUID) -> ModelDownload:
        row = await self._database.fetchrow(_OWN, download_id, team_id)
        if row is None:
            raise NotFoundError(f"There is no download {download_id}.")
        return ModelDownload(**_members(row))

    async def cancel(self, team_id: str, download_id: UUID) -> ModelDownload:
        """Cancel a download; its worker stops it within seconds. An ended one stays unchanged."""
        await self._database.fetch(_CANCEL, download_id, team_id)
        return await self.get(team_id, download_id)

    # --- for its worker -------------------------------------------------------------------------

    async def claim(self, profiles: Sequence[str], lease_seconds: float) -> ModelDownload | None:
        """Claim a download that is due; no other worker claims it before the lease is over."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(_CLAIM, profiles, lease_seconds)
        return ModelDownload(**_members(row)) if row else None

    async def renew(
        self, download: ModelDownload, done: int, total: int | None, lease_seconds: float
    ) -> bool:
        """Store the most bytes that were there and renew the lease; False if the lease is lost or the download ended."""
        row = await self._database.fetchrow(
            _RENEW, download.id, download.attempt, done, total, lease_seconds
        )
        return row is not None

    async def retry(self, download: ModelDownload, reason: str) -> None:
        """Queue the download again, after a growing pause; fail it after MAX_FAILURES in a row."""
        await self._database.fetch(_RETRY, download.id, download.attempt, reason)

    async def release(self, download: ModelDownload) -> None:
        """Queue the download for another worker, in its former place."""
        await self._database.fetch(_RELEASE, download.id, download.attempt)

    async def complete(self, download: ModelDownload, commit: str, total: int) -> None:
        await self._database.fetch(_COMPLETE, download.id, download.attempt, commit, total)

    async def fail(self, download: ModelDownload, reason: str) -> None:
        await self._database.fetch(_FAIL, download.id, download.attempt, reason)


def _members(row: asyncpg.Record) -> dict[str, Any]:
    return {one.name: row[one.name] for one in fields(ModelDownload)}
