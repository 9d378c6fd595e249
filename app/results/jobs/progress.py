"""Progress of jobs: counts, the order of ends, the end of a job, its cancellation and its removal.

A row's end leaves an event in the transaction that ends the result (a trigger, `core/tables/jobs.py`).
One process at a time takes events in batches: a transaction gives ended rows their places, adds to the
counts of their jobs, and removes the events. So no two ends wait for each other, places rise in the
order of commits, and a reader that has read a place has read all before it.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import asyncpg
import orjson

from app.core.database import Connection, Database
from app.core.ids import HIGHEST_ID, LOWEST_ID
from app.core.listener import ENDED, IDS_PER_NOTIFICATION
from app.core.polling import PollingLoop
from app.queue import cancel
from app.queue.notifications import NOTIFY_DELIVERIES, notify_ids
from app.queue.terminal_state import MAX_BATCH
from app.results.jobs.rows import add_counts

_PERIOD_SECONDS = 0.5
_MAX_EVENTS = 2_000  # of a transaction
_MAX_REMOVED = 2_000  # rows of a transaction
# Events that were committed late lie before the place where the last batch ended. A look from the first
# place on reads all dead rows until they are vacuumed, so it is done only this often.
_LATE_SECONDS = 5.0

_LOCK = "SELECT pg_try_advisory_xact_lock(hashtext('jobs'), $1)"
_COUNTING, _CANCELLING = 0, 1

_LOOK = """
SELECT EXISTS (SELECT FROM job_events WHERE id > $1) AS counts,
  EXISTS (SELECT FROM jobs WHERE cancel_requested_at IS NOT NULL AND ended_at IS NULL
          AND deleted_at IS NULL) AS cancels,
  EXISTS (SELECT FROM jobs WHERE deleted_at IS NOT NULL) AS removes
"""
_DUE = """
SELECT id, job_id, result_id, ended_as, rows, prompt_tokens, completion_tokens
FROM job_events WHERE id > $1 ORDER BY id LIMIT $2
"""
_PROGRESS = """
SELECT job_id, rows, last_place, ended, prompt_tokens, completion_tokens,
  changed_at < now() - interval '1 minute' AS has_rested
FROM job_progress WHERE job_id = ANY($1::uuid[]) ORDER BY job_id FOR UPDATE
"""
# LATERAL and OFFSET 0: each row is found by itself. A join may read all pending rows.
_PLACE = """
WITH ended AS MATERIALIZED (
  SELECT r.key, i.* FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[])
    AS i(job_id, result_id, place, ended_as)
  CROSS JOIN LATERAL (
    SELECT key FROM job_rows
    WHERE job_id = i.job_id AND result_id = i.result_id AND place IS NULL OFFSET 0) r
)
UPDATE job_rows r SET place = e.place, ended_as = e.ended_as FROM ended e
WHERE r.key = e.key AND r.job_id = e.job_id
RETURNING r.job_id, r.ended_as
"""
_ADD = """
UPDATE job_progress p SET rows = i.rows, last_place = i.last_place, ended = i.ended::jsonb,
  prompt_tokens = i.prompt_tokens, completion_tokens = i.completion_tokens, changed_at = now(),
  began_at = CASE WHEN i.begins THEN now() ELSE p.began_at END,
  began_place = CASE WHEN i.begins THEN p.last_place ELSE p.began_place END
FROM unnest(
    $1::uuid[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[], $6::bigint[], $7::boolean[])
  AS i(job_id, rows, last_place, ended, prompt_tokens, completion_tokens, begins)
WHERE p.job_id = i.job_id
"""
_DISMISS = "DELETE FROM job_events WHERE id = ANY($1::bigint[])"

# Very many ids do not fit into one notification: an empty one wakes all that wait.
_NOTIFY_ENDED = f"""CASE WHEN count(*) > {IDS_PER_NOTIFICATION} THEN pg_notify('{ENDED}', '')
  ELSE {notify_ids(ENDED)} END"""
# A statement of its own: who sees that a job is closed sees the events of all its rows.
_END = f"""
WITH ended AS (
  UPDATE jobs SET ended_at = clock_timestamp()
  WHERE id = ANY($1::uuid[]) AND closed_at IS NOT NULL AND ended_at IS NULL
    AND NOT EXISTS (SELECT FROM job_events e WHERE e.job_id = jobs.id)
  RETURNING id, team_id, webhook_url
), deliveries AS (
  INSERT INTO webhook_deliveries AS d (result_id, is_job, team_id, url)
  SELECT id, true, team_id, webhook_url FROM ended WHERE webhook_url IS NOT NULL
  ON CONFLICT (result_id) DO UPDATE SET state = 'pending', attempts = 0, next_attempt_at = now(),
    finished_at = NULL
  RETURNING 1
)
SELECT {NOTIFY_DELIVERIES}, {_NOTIFY_ENDED} FROM ended
"""
_CONTINUE = "UPDATE jobs SET ended_at = NULL WHERE id = ANY($1::uuid[]) AND ended_at IS NOT NULL"

# Some rows of some jobs, so that no job waits for the end of another.
_CANCELLED = """
SELECT id FROM jobs
WHERE cancel_requested_at IS NOT NULL AND ended_at IS NULL AND deleted_at IS NULL
ORDER BY random() LIMIT $1
"""
_JOBS_AT_ONCE = 4
_ROWS_OF_EACH = MAX_BATCH // _JOBS_AT_ONCE
_PENDING = """
SELECT r.result_id AS id, (
  SELECT s.state = 'pending' AND s.cancel_requested_at IS NULL
  FROM results s WHERE s.id = r.result_id) AS is_due
FROM job_rows r
WHERE (r.job_id, r.result_id) > ($1, $2) AND (r.job_id, r.result_id) < ($1, $3) AND r.place IS NULL
ORDER BY r.job_id, r.result_id LIMIT $4
"""

_DELETED = "SELECT id FROM jobs WHERE deleted_at IS NOT NULL ORDER BY id LIMIT 1"
# Each index of rows by job has the rows of one end.
_REMOVE = """
DELETE FROM job_rows WHERE ctid = ANY (ARRAY(
  (SELECT ctid FROM job_rows WHERE job_id = $1 AND place IS NULL LIMIT $2)
  UNION ALL
  (SELECT ctid FROM job_rows WHERE job_id = $1 AND ended_as = 'completed' LIMIT $2)
  UNION ALL
  (SELECT ctid FROM job_rows WHERE job_id = $1 AND ended_as <> 'completed' LIMIT $2)))
"""
_REMOVE_EVENTS = "DELETE FROM job_events WHERE job_id = $1"
_REMOVE_DELIVERY = "DELETE FROM webhook_deliveries WHERE result_id = $1 AND is_job"
_REMOVE_JOB = "DELETE FROM jobs WHERE id = $1"


@dataclass(slots=True)
class _Changes:
    """The events of one job in a batch."""

    new_rows: int = 0
    recounted: Counter[str] = field(default_factory=Counter)  # retried rows, by their former end
    ends: list[tuple[UUID, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, event: asyncpg.Record) -> None:
        self.prompt_tokens += event["prompt_tokens"]
        self.completion_tokens += event["completion_tokens"]
        if event["result_id"] is not None:
            self.ends.append((event["result_id"], event["ended_as"]))
        elif event["ended_as"] is not None:
            self.recounted[event["ended_as"]] += event["rows"]
        else:
            self.new_rows += event["rows"]


class JobKeeper:
    """Counts events, cancels rows of cancelled jobs, removes deleted jobs; any process may run it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._place = 0  # the event with which the last batch ended
        self._looked_at = 0.0  # monotonic time of the last look from the first event on
        self._cancelled: dict[UUID, UUID] = {}  # by job: the last row that was looked at

    async def run(self) -> None:
        await PollingLoop("jobs", self.step, seconds=_PERIOD_SECONDS).run()

    async def step(self) -> float:
        """Do a part of each work; the seconds to pause afterwards."""
        now = time.monotonic()
        if now - self._looked_at >= _LATE_SECONDS:
            self._place, self._looked_at = 0, now
        (look,) = await self._database.fetch(_LOOK, self._place)
        has_more = False
        if look["counts"]:
            has_more |= await self.count()
        if look["cancels"]:
            has_more |= await self._database.run(self._cancel_some)
        if look["removes"]:
            has_more |= await self._database.run(_remove_some)
        return 0.0 if has_more else _PERIOD_SECONDS

    async def count(self) -> bool:
        """Count a batch of events; True if there may be more."""
        after = self._place

        async def work(connection: Connection) -> Sequence[asyncpg.Record]:
            async with connection.transaction():
                if not await connection.fetchval(_LOCK, _COUNTING):
                    return []
                events = await connection.fetch(_DUE, after, _MAX_EVENTS)
                if events:
                    await _count(connection, events)
            return events

        events = await self._database.run(work)
        if events:
            self._place = events[-1]["id"]
        return len(events) == _MAX_EVENTS

    async def _cancel_some(self, connection: Connection) -> bool:
        """Cancel pending rows of some cancelled jobs; True if there may be more.

        It walks over the rows of each, since those that run stay until their worker has stopped them.
        """
        async with connection.transaction():
            if not await connection.fetchval(_LOCK, _CANCELLING):
                return False
            due: list[UUID] = []
            has_more = False
            for job in await connection.fetch(_CANCELLED, _JOBS_AT_ONCE):
                after = self._cancelled.pop(job["id"], LOWEST_ID)
                rows = await connection.fetch(_PENDING, job["id"], after, HIGHEST_ID, _ROWS_OF_EACH)
                due += [row["id"] for row in rows if row["is_due"]]
                if len(rows) == _ROWS_OF_EACH:
                    self._cancelled[job["id"]], has_more = rows[-1]["id"], True
            if due:
                await cancel.cancel_of_any_team(connection, sorted(due))
        return has_more


async def _count(connection: Connection, events: Sequence[asyncpg.Record]) -> None:
    changes: dict[UUID, _Changes] = defaultdict(_Changes)
    for event in events:
        changes[event["job_id"]].add(event)
    # A job that was removed has none.
    progress = await connection.fetch(_PROGRESS, list(changes))
    known = {row["job_id"]: changes[row["job_id"]] for row in progress}
    placed = await _place(connection, progress, known)
    await connection.execute(_DISMISS, [event["id"] for event in events])
    added = [_added(row, known[row["job_id"]], placed[row["job_id"]]) for row in progress]
    if added:
        await connection.execute(_ADD, *zip(*added, strict=True))
    complete = [row[0] for row in added if row[1] == sum(orjson.loads(row[3]).values())]
    # A job whose retried rows have all ended by now ends again.
    goes_on = [one for one in known if known[one].recounted or one not in complete]
    await connection.execute(_CONTINUE, goes_on)
    await connection.execute(_END, complete)


async def _place(
    connection: Connection, progress: Sequence[asyncpg.Record], known: dict[UUID, _Changes]
) -> dict[UUID, Counter[str]]:
    """Give ended rows their places; their number in each job, by their ends."""
    rows = [
        (row["job_id"], result_id, place, ended_as)
        for row in progress
        for place, (result_id, ended_as) in enumerate(
            known[row["job_id"]].ends, row["last_place"] + 1
        )
    ]
    counts: dict[UUID, Counter[str]] = defaultdict(Counter)
    if rows:
        for row in await connection.fetch(_PLACE, *zip(*rows, strict=True)):
            counts[row["job_id"]][row["ended_as"]] += 1
    return counts


def _added(
    row: asyncpg.Record, changes: _Changes, placed: Counter[str]
) -> tuple[UUID, int, int, str, int, int, bool]:
    before = orjson.loads(row["ended"])
    ended = add_counts(before, [*placed.items(), *changes.recounted.items()])
    # Rows that are sent one by one, and end as fast, are one run: its speed is that of all of them.
    begins = row["rows"] == sum(before.values()) and bool(
        changes.recounted or (changes.new_rows and row["has_rested"])
    )
    return (
        row["job_id"],
        row["rows"] + changes.new_rows,
        row["last_place"] + len(changes.ends),
        orjson.dumps(ended).decode(),
        row["prompt_tokens"] + changes.prompt_tokens,
        row["completion_tokens"] + changes.completion_tokens,
        begins,
    )


async def _remove_some(connection: Connection) -> bool:
    """Remove rows of a deleted job, and at last the job; True if there may be more."""
    job_id = await connection.fetchval(_DELETED)
    if job_id is None:
        return False
    async with connection.transaction():
        if not await connection.fetchval(_LOCK, _COUNTING):
            return False
        if await connection.execute(_REMOVE, job_id, _MAX_REMOVED) == "DELETE 0":
            await connection.execute(_REMOVE_EVENTS, job_id)
            await connection.execute(_REMOVE_DELIVERY, job_id)
            await connection.execute(_REMOVE_JOB, job_id)
    return True
