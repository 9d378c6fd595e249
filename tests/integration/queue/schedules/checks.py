"""Invariants after every schedule, and the runs of an example in many schedules."""

import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import asyncpg

from app.core.database import Database
from tests.conftest import connect
from tests.integration.queue.queue_bench import Bench
from tests.integration.queue.schedules.scheduler import Choices, Schedule, SteppedConnection

# No statement changes an end, takes a running result from its worker, or claims without a new attempt.
_GUARD = """
CREATE FUNCTION guard_result() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF OLD.state <> 'pending' AND (NEW.state, NEW.finished_at, NEW.error_code)
      IS DISTINCT FROM (OLD.state, OLD.finished_at, OLD.error_code) THEN
    RAISE EXCEPTION 'result % ends a second time', OLD.id;
  END IF;
  IF OLD.worker_id IS NOT NULL AND NEW.worker_id <> OLD.worker_id THEN
    RAISE EXCEPTION 'result % has two owners', OLD.id;
  END IF;
  IF NEW.attempt <> OLD.attempt + (OLD.worker_id IS NULL AND NEW.worker_id IS NOT NULL)::int THEN
    RAISE EXCEPTION 'result % goes from attempt % to %', OLD.id, OLD.attempt, NEW.attempt;
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER guard AFTER UPDATE ON results FOR EACH ROW EXECUTE FUNCTION guard_result();
"""
_FAULTS = """
SELECT 'pending with a dead worker' AS fault, r.id FROM results r JOIN workers w ON w.id = r.worker_id
WHERE r.state = 'pending' AND w.dead_at IS NOT NULL
UNION ALL
SELECT 'queued and running', id FROM results
WHERE state = 'pending' AND (worker_id IS NULL) <> (started_at IS NULL)
UNION ALL
SELECT 'ended, and not due to be indexed once', r.id FROM results r
WHERE r.state <> 'pending' AND NOT EXISTS (SELECT FROM result_search s WHERE s.result_id = r.id)
  AND (SELECT count(*) FROM undigested_results u WHERE u.result_id = r.id) <> 1
UNION ALL
SELECT 'pending, and due to be indexed', r.id FROM results r
JOIN undigested_results u ON u.result_id = r.id WHERE r.state = 'pending'
UNION ALL
SELECT 'ended with a webhook without a delivery', r.id FROM results r
WHERE r.state <> 'pending' AND r.webhook_url IS NOT NULL
  AND NOT EXISTS (SELECT FROM webhook_deliveries d WHERE d.result_id = r.id)
UNION ALL
SELECT 'a suspect beside others', r.id FROM results r
WHERE r.state = 'pending' AND r.worker_id IS NOT NULL AND r.engine_deaths >= 2 AND EXISTS (
  SELECT FROM results o WHERE o.state = 'pending' AND o.worker_id IS NOT NULL AND o.id <> r.id)
UNION ALL
SELECT 'chunks without a pending result', c.result_id FROM result_chunks c
LEFT JOIN results r ON r.id = c.result_id WHERE r.id IS NULL OR r.state <> 'pending'
UNION ALL
SELECT 'a result without its context', r.id FROM results r
LEFT JOIN contexts c ON c.id = r.context_id WHERE c.id IS NULL
UNION ALL
SELECT 'a row of a result that is not there', o.result_id FROM (
  SELECT result_id FROM result_search UNION ALL SELECT result_id FROM idempotency_keys
  UNION ALL SELECT result_id FROM webhook_deliveries UNION ALL SELECT result_id FROM result_tags) o
LEFT JOIN results r ON r.id = o.result_id WHERE r.id IS NULL
UNION ALL
SELECT 'a batch that miscounts', b.id FROM batches b
WHERE b.ended_at IS NULL AND (b.completed, b.failed) <> (
  SELECT count(*) FILTER (WHERE is_completed), count(*) FILTER (WHERE NOT is_completed)
  FROM batch_lines l WHERE l.batch_id = b.id AND l.state = 'done')
"""
_CLEAN = """
DELETE FROM contexts; DELETE FROM workers; DELETE FROM result_chunks; DELETE FROM undigested_results;
DELETE FROM batches; DELETE FROM files; DELETE FROM rate_buckets; DELETE FROM team_limits;
DELETE FROM webhook_secrets; DELETE FROM minute_stats;
UPDATE retention_state SET looked_at = NULL, cleaned_at = NULL, trusted_at = NULL;
"""

Example = Callable[[Schedule], Awaitable[None]]


@dataclass
class Schedules:
    """Runs an example again and again, each time on an empty database, in another order of turns."""

    bench: Bench
    connections: Sequence[SteppedConnection]
    gate: asyncpg.Connection
    factor: int  # of the number of schedules
    seed: int

    async def check(self, example: Example, most: int = 24) -> None:
        """Run every schedule of the example, or a sample of `most`."""
        choices = Choices(self.seed)
        for _ in range(most * self.factor):
            choices.begin()
            await self._check(example, choices)
            choices.end()
            if choices.is_exhausted:
                return

    async def _check(self, example: Example, choices: Choices) -> None:
        observer = self.bench.connection
        await observer.execute(_CLEAN)
        schedule = Schedule(self.bench.settings, self.connections, observer, self.gate, choices)
        try:
            await example(schedule)
            assert schedule.deadlocks == 0, "a statement met a deadlock"
            faults = await observer.fetch(_FAULTS)
            assert faults == [], [row["fault"] for row in faults]
        except BaseException as error:
            error.add_note("\n".join([f"seed {self.seed}", *schedule.steps]))
            raise


@contextlib.asynccontextmanager
async def open_schedules(database: Database) -> AsyncIterator[Schedules]:
    """Schedules on a database; `FUZZ=20` runs twenty times as many, in random orders."""
    settings = database._settings
    observer, gate = await connect(settings), await connect(settings)
    await observer.execute(_GUARD)
    connections = [await _connect_stepped(database) for _ in range(2)]
    factor = int(os.environ.get("FUZZ", "1"))
    seed = 1 if factor == 1 else random.randrange(1 << 32)  # noqa: S311 - a failure names it
    yield Schedules(Bench(database, settings, observer), connections, gate, factor, seed)
    for connection in (observer, gate, *connections):
        await connection.close()


async def _connect_stepped(database: Database) -> SteppedConnection:
    """Connect as the pool of a process does."""
    arguments = database._arguments()
    arguments["connection_class"] = SteppedConnection
    arguments["server_settings"]["deadlock_timeout"] = "50ms"
    connection = await database._primary.connect(**arguments)
    assert isinstance(connection, SteppedConnection)
    return connection
