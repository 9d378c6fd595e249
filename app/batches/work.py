"""Batches as their processors see them: every statement that moves a batch or its lines.

One process at a time holds a batch, by a lease. The lease does not keep a line from being sent
twice; the id of its result does, which is stored before the line is sent. Each statement names the
state it expects, so a delayed process cannot overwrite the work of its successor.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson

from app.batches.files import FileDetails, FileWriter, finish_file
from app.batches.rows import ACTIVE, COLUMNS, Batch, End, Line, LineOutcome, NewLine
from app.core.database import Connection, Database
from app.core.errors import NotFoundError
from app.core.record_set import RecordSet
from app.results.sizes import json_bytes, text_bytes, vector_bytes

_PAGE_BYTES = 8_000_000  # of bodies that are read at once
_RENEWALS = 3  # within one lease

_CLAIM = f"""
WITH free AS (
  SELECT id FROM batches
  WHERE {ACTIVE} AND (lease_expires_at IS NULL OR lease_expires_at <= now())
    AND team_id <> ALL($4::text[])
  -- Those that yielded come last, the first of them first; those that are over come before all others.
  ORDER BY expires_at > now(), lease_expires_at NULLS FIRST, id LIMIT $2 FOR UPDATE SKIP LOCKED
)
UPDATE batches b SET feeder_id = $1, lease_expires_at = now() + make_interval(secs => $3)
FROM free WHERE b.id = free.id RETURNING b.id, b.team_id
"""
_ARE_FREE = f"""
SELECT EXISTS (
  SELECT FROM batches
  WHERE {ACTIVE} AND (lease_expires_at IS NULL OR lease_expires_at <= now()))
"""
_YIELD = """
UPDATE batches SET lease_expires_at = now(), feeder_id = NULL
WHERE id = ANY($1::uuid[]) AND feeder_id = $2
"""
_RENEW = f"""
UPDATE batches SET lease_expires_at = now() + make_interval(secs => $3)
WHERE id = $1 AND feeder_id = $2 AND {ACTIVE} RETURNING id
"""
_RELEASE = """
UPDATE batches SET lease_expires_at = NULL, feeder_id = NULL
WHERE id = ANY($1::uuid[]) AND feeder_id = $2
"""
_LOOK = f"""
SELECT {COLUMNS}, extract(epoch FROM expires_at - now())::float8 AS seconds_left
FROM batches WHERE id = $1 AND feeder_id = $2 AND {ACTIVE}
"""
_MARK_EXPIRING = """
UPDATE batches SET expiring_at = now()
WHERE id = $1 AND state IN ('validating', 'in_progress') AND expires_at <= now()
  AND expiring_at IS NULL
"""

_LINES, _DONE = RecordSet(NewLine), RecordSet(LineOutcome)
_ADD_LINES = f"""
INSERT INTO batch_lines (batch_id, line, custom_id, body)
SELECT $1, i.* FROM ({_LINES.select(2)}) i
ON CONFLICT (batch_id, line) DO NOTHING
"""
_BEGIN = """
UPDATE batches SET state = 'in_progress', in_progress_at = now(), total = $2
WHERE id = $1 AND state = 'validating'
"""
_REFUSE = """
WITH refused AS (
  UPDATE batches SET state = 'failed', ended_at = now(), errors = $2::jsonb
  WHERE id = $1 AND state = 'validating' RETURNING id
)
DELETE FROM batch_lines WHERE batch_id IN (SELECT id FROM refused)
"""

# A page ends once its bodies have so many bytes: there is always one line.
_WAITING = """
SELECT line, custom_id, body, result_ids FROM (
  SELECT *, sum(octet_length(body)) OVER (ORDER BY line) - octet_length(body) AS before FROM (
    SELECT line, custom_id, body, result_ids FROM batch_lines
    WHERE batch_id = $1 AND line > $2 AND state = 'waiting' ORDER BY line LIMIT $3
  ) page
) measured WHERE before < $4 ORDER BY line
"""
_SENT = """
SELECT line, custom_id, result_ids FROM batch_lines
WHERE batch_id = $1 AND state = 'sent' ORDER BY line
"""
_BODY = "SELECT body FROM batch_lines WHERE batch_id = $1 AND line = $2"
# The first feeder's ids stay: the answer has those of all lines asked for.
_ASSIGN = """
WITH assigned AS (
  UPDATE batch_lines l SET result_ids = i.ids::uuid[]
  FROM unnest($2::int[], $3::text[]) AS i(line, ids)
  WHERE l.batch_id = $1 AND l.line = i.line AND l.state = 'waiting' AND l.result_ids IS NULL
  RETURNING l.line
)
SELECT count(*) FROM assigned
"""
_ASSIGNED = """
SELECT line, result_ids FROM batch_lines
WHERE batch_id = $1 AND line = ANY($2::int[]) AND state = 'waiting'
"""
_MARK_SENT = """
UPDATE batch_lines SET state = 'sent'
WHERE batch_id = $1 AND line = ANY($2::int[]) AND state = 'waiting'
"""
# Lines that may have been sent when their batch is stopped.
_MARK_ASSIGNED_SENT = """
UPDATE batch_lines SET state = 'sent'
WHERE batch_id = $1 AND state = 'waiting' AND result_ids IS NOT NULL
"""
_MARK_DONE = f"""
WITH done AS (
  UPDATE batch_lines l
  SET state = 'done', body = NULL, is_completed = i.is_completed, outcome = i.outcome
  FROM ({_DONE.select(2)}) i
  WHERE l.batch_id = $1 AND l.line = i.line AND l.state <> 'done'
  RETURNING l.is_completed
), counted AS (
  SELECT count(*) FILTER (WHERE is_completed) AS completed,
    count(*) FILTER (WHERE NOT is_completed) AS failed FROM done
)
UPDATE batches b SET completed = b.completed + c.completed, failed = b.failed + c.failed
FROM counted c WHERE b.id = $1
"""
# Results that are over, or gone, and the sizes of their outputs.
_OVER = f"""
SELECT i.id, {text_bytes("r.output")} + {text_bytes("r.prompt_logprobs")} + {vector_bytes("r.vector")} + {json_bytes("r.logprobs")} AS size
FROM unnest($1::uuid[]) AS i(id) LEFT JOIN results r ON r.id = i.id
WHERE r.id IS NULL OR r.state <> 'pending'
"""
_OUTCOMES = """
SELECT line, is_completed, outcome FROM (
  SELECT *, sum(octet_length(outcome)) OVER (ORDER BY line) - octet_length(outcome) AS before FROM (
    SELECT line, is_completed, outcome FROM batch_lines
    WHERE batch_id = $1 AND line > $2 AND state = 'done' ORDER BY line LIMIT $3
  ) page
) measured WHERE before < $4 ORDER BY line
"""
# Checks itself that all lines are done. A batch that was stopped before it began lacks some lines.
_FINALIZE = """
UPDATE batches b SET finalizing_at = now(),
  state = CASE WHEN state = 'cancelling' THEN state ELSE 'finalizing' END
WHERE id = $1 AND state IN ('in_progress', 'cancelling', 'validating') AND finalizing_at IS NULL
  AND (in_progress_at IS NULL OR NOT EXISTS (
    SELECT FROM batch_lines l WHERE l.batch_id = b.id AND l.state <> 'done'))
"""
_END = """
UPDATE batches SET state = $3, ended_at = now(), output_file_id = $4, error_file_id = $5
WHERE id = $1 AND feeder_id = $2 AND state IN ('finalizing', 'cancelling') RETURNING id
"""


class BatchWork:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self, feeder_id: UUID, count: int, lease_seconds: float, busy_teams: Sequence[str] = ()
    ) -> list[tuple[UUID, str]]:
        """Claim batches of other teams; returns their ids and teams.

        Not repeated: batches of a lost connection are free again after the lease.
        """
        async with self._database.connection() as connection:
            rows = await connection.fetch(_CLAIM, feeder_id, count, lease_seconds, busy_teams)
        return [(row["id"], row["team_id"]) for row in rows]

    async def are_free(self) -> bool:
        """Return whether batches wait for a process."""
        row = await self._database.fetchrow(_ARE_FREE)
        return row is not None and bool(row[0])

    async def yield_place(self, feeder_id: UUID, ids: Sequence[UUID]) -> None:
        """Leave batches to any process, behind all others that wait for one."""
        await self._database.fetch(_YIELD, list(ids), feeder_id)

    async def renew(self, feeder_id: UUID, batch_id: UUID, lease_seconds: float) -> bool:
        """Hold a batch for longer; whether it is still this feeder's, and not ended."""
        row = await self._database.fetchrow(_RENEW, batch_id, feeder_id, lease_seconds)
        return row is not None

    async def release(self, feeder_id: UUID, ids: Sequence[UUID]) -> None:
        await self._database.fetch(_RELEASE, list(ids), feeder_id)

    async def look(self, feeder_id: UUID, batch_id: UUID) -> Batch | None:
        row = await self._database.fetchrow(_LOOK, batch_id, feeder_id)
        return None if row is None else Batch(**row)

    async def mark_expiring(self, batch_id: UUID) -> None:
        await self._database.fetch(_MARK_EXPIRING, batch_id)

    async def refuse(self, batch_id: UUID, errors: Sequence[dict[str, object]]) -> None:
        await self._database.fetch(_REFUSE, batch_id, orjson.dumps(errors).decode())

    async def begin(self, batch_id: UUID, total: int) -> None:
        await self._database.fetch(_BEGIN, batch_id, total)

    async def begin_end(self, batch_id: UUID) -> None:
        """If all lines are done, only the files are left to be written."""
        await self._database.fetch(_FINALIZE, batch_id)

    async def end(
        self,
        feeder_id: UUID,
        batch: Batch,
        end: End,
        output: FileWriter | None,
        errors: FileWriter | None,
    ) -> bool:
        """End a batch, have its files seen and its lines forgotten; False if it is another's."""

        async def work(connection: Connection) -> bool:
            async with connection.transaction():
                files = output and output.id, errors and errors.id
                if await connection.fetchval(_END, batch.id, feeder_id, end, *files) is None:
                    return False
                for writer, kind in ((output, "output"), (errors, "error")):
                    if writer is not None:
                        name = f"batch_{batch.id}_{kind}.jsonl"
                        details = FileDetails("batch_output", name, batch.output_seconds)
                        await finish_file(connection, writer, details)
                await connection.execute("DELETE FROM batch_lines WHERE batch_id = $1", batch.id)
            return True

        return await self._database.run(work)

    # --- lines ----------------------------------------------------------------------------------

    async def add_lines(self, batch_id: UUID, lines: Sequence[NewLine]) -> None:
        await self._database.fetch(_ADD_LINES, batch_id, *_LINES.arguments(lines))

    async def waiting(
        self, batch_id: UUID, after: int, limit: int, max_bytes: int = _PAGE_BYTES
    ) -> list[Line]:
        """The next lines to be sent, behind a line; none past `max_bytes` of bodies is begun."""
        rows = await self._database.fetch(_WAITING, batch_id, after, limit, max_bytes)
        return [
            Line(row["line"], row["custom_id"], row["body"], row["result_ids"] or ())
            for row in rows
        ]

    async def sent(self, batch_id: UUID) -> list[Line]:
        rows = await self._database.fetch(_SENT, batch_id)
        return [Line(row["line"], row["custom_id"], "", row["result_ids"] or ()) for row in rows]

    async def body(self, batch_id: UUID, line: int) -> str:
        """The body of a line that is not done. Raises NotFoundError."""
        row = await self._database.fetchrow(_BODY, batch_id, line)
        if row is None or row["body"] is None:
            raise NotFoundError(f"Line {line} of batch {batch_id} is done.")
        return str(row["body"])

    async def assign(self, batch_id: UUID, ids: dict[int, list[UUID]]) -> dict[int, list[UUID]]:
        """Give lines the ids of their results; returns those that they have from now on."""
        texts = ["{" + ",".join(str(one) for one in of_line) + "}" for of_line in ids.values()]
        await self._database.fetch(_ASSIGN, batch_id, list(ids), texts)
        rows = await self._database.fetch(_ASSIGNED, batch_id, list(ids))
        return {row["line"]: row["result_ids"] for row in rows}

    async def mark_sent(self, batch_id: UUID, lines: Sequence[int]) -> None:
        await self._database.fetch(_MARK_SENT, batch_id, list(lines))

    async def mark_assigned_sent(self, batch_id: UUID) -> None:
        """Take every line that may have been sent for sent."""
        await self._database.fetch(_MARK_ASSIGNED_SENT, batch_id)

    async def mark_done(self, batch_id: UUID, outcomes: Sequence[LineOutcome]) -> None:
        await self._database.fetch(_MARK_DONE, batch_id, *_DONE.arguments(outcomes))

    async def over(self, ids: Sequence[UUID]) -> dict[UUID, int]:
        """Those that are over, and the sizes of their outputs in bytes, at most."""
        rows = await self._database.fetch(_OVER, list(ids))
        return {row["id"]: row["size"] for row in rows}

    async def outcomes(self, batch_id: UUID, after: int, limit: int) -> list[LineOutcome]:
        """The next outcomes behind a line; none past some megabytes is begun."""
        rows = await self._database.fetch(_OUTCOMES, batch_id, after, limit, _PAGE_BYTES)
        return [LineOutcome(**row) for row in rows]


@dataclass(slots=True)
class BatchLease:
    """Renews the lease of a batch as often as needed."""

    work: BatchWork
    feeder_id: UUID
    batch_id: UUID
    seconds: float
    _renew_at: float = 0.0

    @property
    def renewal_seconds(self) -> float:
        return self.seconds / _RENEWALS

    async def renew(self) -> bool:
        """Hold the batch for longer; False once it has ended or another process holds it."""
        now = asyncio.get_running_loop().time()
        if now < self._renew_at:
            return True
        self._renew_at = now + self.renewal_seconds
        return await self.work.renew(self.feeder_id, self.batch_id, self.seconds)
