"""The ledger of usage: each ended result is added once, by the transaction that marks it as counted.

The mark is `in_usage` of the result's row in `result_search`. The indexer sets it as it inserts that
row. A result that is deleted before that, or that a process of an older version indexed, is settled:
the transaction that deletes it, or the walk over older results, marks and adds it.

Each transaction appends rows to `usage_entries`, so that writers of one team do not wait for each
other. Once a minute one process moves these rows to `usage_days`, which has one row for each day, team,
token, model and end. A report reads both tables in one statement.
"""

from collections.abc import Sequence
from uuid import UUID

from app.core.database import Connection, Database
from app.inference.adapters import ADAPTER_PARAMETER
from app.queue.terminal_state import OF_TEXT

_KEYS = ("team_id", "day", "token_id", "model_name", "adapter", "ended_as")
SUMS = (
    *("results", "prompt_tokens", "cached_prompt_tokens"),
    *("completion_tokens", "reasoning_tokens", "engine_microseconds"),
)
_COLUMNS = ", ".join((*_KEYS, *SUMS))
DELETED = "deleted"  # the end of a result that was deleted while it was pending
_MAX_MOVED = 5_000  # entries of a statement

# Time of the last attempt, and of earlier ones that the engine accepted. The history may have the last
# one too; of a result that was not running as it ended, it has all.
_ENGINE_TIME = """greatest(interval '0', coalesce(r.finished_at, now()) - r.started_at)
    + CASE WHEN r.attempt_history = '[]' THEN interval '0' ELSE coalesce((
      SELECT sum(greatest(interval '0',
        (e ->> 'ended_at')::timestamptz - (e ->> 'started_at')::timestamptz))
      FROM jsonb_array_elements(r.attempt_history) e
      WHERE r.started_at IS NULL OR (e ->> 'attempt')::int < r.attempt), interval '0') END"""

_ADAPTER = f"coalesce(r.parameters ->> '{ADAPTER_PARAMETER}', '')"

# No engine reports cached or reasoning tokens.
_ADD = f"""
INSERT INTO usage_entries ({_COLUMNS})
SELECT r.team_id, (r.finished_at AT TIME ZONE 'UTC')::date, coalesce(r.token_id, ''), r.model_name,
  {_ADAPTER}, coalesce(r.error_code, 'completed'), count(*),
  coalesce(sum(r.prompt_tokens) FILTER (WHERE r.reused_from IS NULL), 0), 0,
  coalesce(sum(r.completion_tokens) FILTER (WHERE r.reused_from IS NULL), 0), 0,
  sum(extract(epoch FROM {_ENGINE_TIME}) * 1000000)::bigint
FROM results r WHERE r.id = ANY ({{ids}}) GROUP BY 1, 2, 3, 4, 5, 6
"""
_ADD_IDS = _ADD.format(ids="$1::uuid[]")

# The lock keeps a deletion from removing a result between its mark and the addition.
_SETTLE = f"""
WITH due AS MATERIALIZED (
  SELECT r.id, r.team_id FROM results r
  WHERE r.id = ANY($1::uuid[]) AND r.state <> 'pending' AND NOT EXISTS (
    SELECT FROM result_search s WHERE s.result_id = r.id AND s.in_usage)
  ORDER BY r.id FOR KEY SHARE
), marked AS (
  INSERT INTO result_search AS s (result_id, team_id, in_usage)
  SELECT id, team_id, true FROM due ORDER BY id
  ON CONFLICT (result_id) DO UPDATE SET in_usage = true WHERE NOT s.in_usage
  RETURNING result_id
)
{_ADD.format(ids="ARRAY(SELECT result_id FROM marked)")}
"""

# Pending results that have begun, as far as their text is stored.
_ADD_DELETED = f"""
INSERT INTO usage_entries ({_COLUMNS})
SELECT r.team_id, (now() AT TIME ZONE 'UTC')::date, coalesce(r.token_id, ''), r.model_name,
  {_ADAPTER}, '{DELETED}', count(*), coalesce(sum(c.prompt_tokens), 0), 0, coalesce(sum(c.completion_tokens), 0),
  0, sum(extract(epoch FROM {_ENGINE_TIME}) * 1000000)::bigint
FROM results r CROSS JOIN LATERAL (
  SELECT max(c.prompt_tokens) AS prompt_tokens, max(c.completion_tokens) AS completion_tokens
  FROM result_chunks c WHERE {OF_TEXT}) c
WHERE r.id = ANY($1::uuid[]) AND r.state = 'pending' AND r.attempt > 0 GROUP BY 1, 2, 3, 4, 5, 6
"""

# Rows of both tables are locked in one order, although one process at a time should move them.
_COMPACT = f"""
WITH moved AS (
  DELETE FROM usage_entries WHERE id = ANY (ARRAY(
    SELECT id FROM usage_entries ORDER BY id LIMIT {_MAX_MOVED} FOR UPDATE SKIP LOCKED))
  RETURNING {_COLUMNS}
), summed AS (
  INSERT INTO usage_days AS d ({_COLUMNS})
  SELECT {", ".join(_KEYS)}, {", ".join(f"sum({name})" for name in SUMS)} FROM moved
  GROUP BY {", ".join(_KEYS)} ORDER BY {", ".join(_KEYS)}
  ON CONFLICT ({", ".join(_KEYS)}) DO UPDATE SET
    {", ".join(f"{name} = d.{name} + excluded.{name}" for name in SUMS)}
)
SELECT count(*) FROM moved
"""


async def add(connection: Connection, ids: Sequence[UUID]) -> None:
    """Add results that this transaction has marked."""
    await connection.execute(_ADD_IDS, ids)


async def settle(connection: Connection, ids: Sequence[UUID]) -> None:
    """Mark and add those of the ended results that the ledger does not have."""
    if ids:
        await connection.execute(_SETTLE, ids)


async def add_deleted(connection: Connection, ids: Sequence[UUID]) -> None:
    """Add those of the results that are pending and have begun: this transaction deletes them."""
    if ids:
        await connection.execute(_ADD_DELETED, ids)


async def compact(database: Database) -> None:
    """Move the entries that are there to the days, some at a time."""
    while await database.run(_move) == _MAX_MOVED:
        pass


async def _move(connection: Connection) -> int:
    count: int = await connection.fetchval(_COMPACT)
    return count
