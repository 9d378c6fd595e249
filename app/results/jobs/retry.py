"""Retry of the failed rows of a job, a batch at a time.

The statement that stores a new result gives it to its row, if the row still has the failed one. So a
batch that is repeated while its rows are pending, or that meets another one, retries no row twice. Rows
that have failed again by then have places behind `until`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import asyncpg

from app.auth.principal import Principal
from app.core.database import Database
from app.core.errors import NotFoundError, ServiceError
from app.core.fair_share import in_turns
from app.core.ids import new_id
from app.queue.enqueue import NewResult
from app.queue.job_rows import JobRow
from app.results.jobs.store import JobStore
from app.results.replays import deleted
from app.results.requests import JobRetry
from app.results.submission import Submissions

_FAILED = """
SELECT key, result_id, request_hash, place, ended_as FROM job_rows
WHERE (job_id, place) > ($1, $2) AND (job_id, place) <= ($1, coalesce($5, 9223372036854775806))
  AND ended_as <> 'completed' AND ($3::text IS NULL OR ended_as = $3)
ORDER BY job_id, place LIMIT $4
"""


@dataclass(slots=True, frozen=True)
class RefusedRow:
    """A failed row that cannot be sent again."""

    key: str
    result_id: UUID
    error: ServiceError


@dataclass(slots=True, frozen=True)
class RetriedBatch:
    """A batch of retries; the next one begins behind the place `following`, if there may be one."""

    retried: int
    refused: Sequence[RefusedRow]
    following: int | None


@dataclass(slots=True, frozen=True)
class JobRetries:
    database: Database
    jobs: JobStore
    submissions: Submissions

    async def retry(self, principal: Principal, job_id: UUID, request: JobRetry) -> RetriedBatch:
        """Send failed rows again, in one commit.

        Raises NotFoundError, ConflictError, QueueFullError and LimitError; nothing is stored then.
        """
        await self.jobs.resume(principal.team_id, job_id)
        rows = await self.database.fetch(
            _FAILED, job_id, request.after, request.error_code, request.limit, request.until
        )
        results: list[NewResult] = []
        refused: list[RefusedRow] = []
        async for row in in_turns(rows):
            try:
                results.append(await self._new_result(principal, job_id, row))
            except ServiceError as error:
                refused.append(RefusedRow(row["key"], row["result_id"], error))
        retried = sum(await self.submissions.store(results)) if results else 0
        following = rows[-1]["place"] if len(rows) == request.limit else None
        return RetriedBatch(retried, refused, following)

    async def _new_result(
        self, principal: Principal, job_id: UUID, row: asyncpg.Record
    ) -> NewResult:
        source: UUID = row["result_id"]
        place = JobRow(job_id, row["key"], row["request_hash"], source, row["ended_as"])
        try:
            prepared = await self.submissions.preparation.retry(principal, source, new_id())
        except NotFoundError as error:
            raise deleted(place, source) from error
        return replace(prepared.result, job=place)
