"""Rows of jobs: a request that is sent again under its key finds the row's result, as long as the job lives.

A key is taken in the statement that stores its result (`enqueue`), under a lock of the job that its
closing waits for. A retried row gets another result under its key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from app.core.database import Connection, await_standby


@dataclass(slots=True, frozen=True)
class JobRow:
    """The place of a new result in a job; `replaces` is the ended result that it retries."""

    job_id: UUID
    key: str
    request_hash: bytes
    replaces: UUID | None = None
    replaced_as: str | None = None  # the end of that result, as it is counted


@dataclass(slots=True, frozen=True)
class TakenRow:
    """A row under its key: its present result, its state, and the hash of its request."""

    result_id: UUID
    request_hash: bytes
    state: Literal["pending", "completed", "failed"] | None  # None: the result has been deleted


def take_rows_sql(has_sources: str, *, replaces: bool) -> str:
    """CTEs that take the keys of the rows of jobs in `input`; `job_keys` has those that are taken.

    A closing or cancellation locks the job `FOR UPDATE`, and waits for this statement's lock. A key that
    is taken is locked only for retried rows. A result without its sources takes no key.
    """
    conflict = "NOTHING"
    if replaces:
        conflict = """UPDATE SET
    result_id = excluded.result_id, replaced_id = excluded.replaced_id, place = NULL, ended_as = NULL
    WHERE k.result_id = excluded.replaced_id AND k.place IS NOT NULL"""
    return f"""open_jobs AS MATERIALIZED (
  SELECT id, team_id, closed_at IS NULL AND max_rows > (
      SELECT p.rows FROM job_progress p WHERE p.job_id = jobs.id) AS takes_rows,
    cancel_requested_at IS NULL AS takes_retries
  FROM jobs
  WHERE id = ANY (ARRAY(SELECT DISTINCT job_id FROM input WHERE job_id IS NOT NULL))
    AND deleted_at IS NULL
  ORDER BY id FOR SHARE
), job_keys AS (
  INSERT INTO job_rows AS k (job_id, key, request_hash, result_id, replaced_id)
  SELECT DISTINCT ON (i.job_id, i.job_key)
    i.job_id, i.job_key, i.job_request_hash, i.id, i.replaces
  FROM input i JOIN open_jobs j ON j.id = i.job_id AND j.team_id = i.team_id
  WHERE CASE WHEN i.replaces IS NULL THEN j.takes_rows ELSE j.takes_retries END AND {has_sources}
  ORDER BY i.job_id, i.job_key, i.id
  ON CONFLICT (job_id, key) DO {conflict}
  RETURNING result_id
), """


# One row for each job, and one for each end of retried rows. By `refused`, not by `job_keys`: a join
# of the two would read their product.
COUNT_ROWS = """counted_rows AS (
  INSERT INTO job_events (job_id, ended_as, rows)
  SELECT job_id, replaced_as, CASE WHEN replaced_as IS NULL THEN count(*) ELSE -count(*) END
  FROM input WHERE job_id IS NOT NULL AND id NOT IN (SELECT id FROM refused)
  GROUP BY job_id, replaced_as
), """

_FIND = """
SELECT k.job_id, k.key, k.result_id, k.request_hash
FROM unnest($1::uuid[], $2::text[]) AS i(job_id, key)
-- OFFSET 0: each key is found by itself. A join may read all keys.
CROSS JOIN LATERAL (SELECT * FROM job_rows WHERE job_id = i.job_id AND key = i.key OFFSET 0) k
WHERE EXISTS (SELECT FROM jobs j WHERE j.id = i.job_id AND j.deleted_at IS NULL)
"""

_STATES = "SELECT id, state FROM results WHERE id = ANY($1::uuid[])"


async def find_rows(
    connection: Connection, keys: Sequence[tuple[UUID, str]], _resent: bool
) -> Sequence[TakenRow | None]:
    rows = await connection.fetch(_FIND, [job for job, _ in keys], [key for _, key in keys])
    if not rows:
        return [None] * len(keys)
    # A result may have ended before its row has a place, or be deleted.
    states = {
        row["id"]: row["state"]
        for row in await connection.fetch(_STATES, [one["result_id"] for one in rows])
    }
    found = {
        (row["job_id"], row["key"]): TakenRow(
            row["result_id"], row["request_hash"], states.get(row["result_id"])
        )
        for row in rows
    }
    await await_standby(connection)  # their ids are returned next
    return [found.get(key) for key in keys]
