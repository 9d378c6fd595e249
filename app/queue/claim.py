"""Claiming: a worker takes results from the queue, in the order of priority, virtual time and age."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from asyncpg import Record

from app.core.database import Connection
from app.queue.continuation import Interrupted, Resume, load_resumes
from app.queue.result_size import UNBOUNDED, expected_bytes, expected_bytes_sql
from app.queue.team_limits import RunningLimits, without_running_limits_sql

# A result that was in flight at this many engine deaths runs alone from then on.
SUSPECT_DEATHS = 2


@dataclass(slots=True, frozen=True)
class Claim:
    """One attempt that this worker may write, as claimed."""

    id: UUID
    attempt: int
    model_name: str
    prompt: str
    parameters: dict[str, Any]
    seconds_left: float
    is_suspect: bool
    has_attribution: bool = False  # one is to follow its completion
    has_webhook: bool = True
    team_id: str = ""
    trace: str | None = None
    resumable: bool = False
    resume: Resume | None = None  # the text of earlier attempts, to be continued
    expected_bytes: int = 0  # that its worker may hold for it
    is_chat: bool = False  # its prompt was rendered of messages


# The worker $1, unless it is marked dead; that waits until this claim is committed.
_ME = """me AS (
  SELECT id FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE
)"""
# By the clock and not by `now()`, the begin of a transaction that may have waited for LOCK_QUEUE: an
# attempt starts behind the end of the one whose place it takes, and has the time that is left then.
_START = """
UPDATE results r
SET worker_id = $1, attempt = r.attempt + 1, started_at = clock_timestamp(), not_before = NULL
WHERE """
# The prompt by a subquery: a join may begin with the contexts, and read all results by theirs.
_CLAIMED = """
RETURNING r.id, r.attempt, r.model_name, r.parameters,
          coalesce(r.prompt, (SELECT c.content FROM contexts c WHERE c.id = r.context_id)) AS prompt,
          r.prompt IS NOT NULL AS is_chat,
          extract(epoch FROM r.deadline_at - clock_timestamp())::float8 AS seconds_left, r.engine_deaths,
          r.attribution, r.webhook_url, r.team_id, r.trace, r.resumable, r.text_attempt,
          CASE WHEN r.text_attempt IS NOT NULL THEN r.attempt_history END AS attempt_history
"""
# An array: a generic plan takes the limit for a tenth of the queue, and would join all ids.
_START_PICKED = f"{_START} r.id = ANY (ARRAY(SELECT id FROM picked)) {_CLAIMED}"


_CLAIMS_KEY = "hashtext('results.claims'), hashtext({})"


def may_claim_sql(model: str) -> str:
    """Keep suspects of a model from being claimed until this transaction ends; false if one is.

    Otherwise a suspect's claim could find the model empty while another claim is not yet committed.
    """
    return f"pg_try_advisory_xact_lock_shared({_CLAIMS_KEY.format(model)})"


def without_suspects_sql(model: str) -> str:
    """Condition: no suspect of a model runs, or has its turn. A probe: NOT EXISTS may read all of them.

    While suspects pause (`suspects`), the other results of their model have theirs.
    """
    return f"""(
    SELECT s.id FROM results s WHERE s.model_name = {model}
      AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS}
      AND (s.worker_id IS NOT NULL OR s.not_before IS NULL OR s.not_before <= now())
    ORDER BY s.id LIMIT 1) IS NULL"""


def _next_team(condition: str) -> str:
    """The first team, in the order of their ids, with a result that waits for the model $2."""
    return f"""(
    SELECT r.team_id FROM results r
    WHERE r.model_name <= $2 AND {condition} AND r.state = 'pending' AND r.worker_id IS NULL
    ORDER BY r.model_name, r.team_id LIMIT 1)"""


def _within_room(room: str) -> str:
    """The first `candidates` whose predecessors leave some of these bytes.

    The last one may exceed them, so that a large result never waits for an idle worker.
    """
    return f"""picked AS (
  SELECT q.id FROM (
    -- In the order in which they come, which is the queue's.
    SELECT id, sum(bytes) OVER (ROWS UNBOUNDED PRECEDING) - bytes AS others FROM candidates) q
  WHERE q.others < {room}::bigint
)"""


CLAIM = f"""
WITH {_ME}, queues AS MATERIALIZED (
  SELECT w.model_name, w.free FROM me, unnest($2::text[], $3::int[]) AS w(model_name, free)
  WHERE {may_claim_sql("w.model_name")}
), candidates AS (
  SELECT p.id, p.bytes FROM queues w
  CROSS JOIN LATERAL (
    SELECT r.id, {expected_bytes_sql("r")} AS bytes FROM results r
    WHERE r.model_name = w.model_name
      AND r.state = 'pending' AND r.worker_id IS NULL
      AND (r.not_before IS NULL OR r.not_before <= now())
    ORDER BY r.priority DESC, r.fair_key, r.id
    LIMIT w.free FOR UPDATE SKIP LOCKED
  ) p
  WHERE {without_suspects_sql("w.model_name")} AND {without_running_limits_sql("w.model_name")}
), {_within_room("$4")}
{_START_PICKED}
"""

# Excludes other counts of a model's running results until the transaction ends.
LOCK_QUEUE = "SELECT pg_advisory_xact_lock(hashtext('results.model_name'), hashtext($1))"

# For a model with running limits: $3 results, at most $4 (NULL: any number) of each team, or as $5
# and $6 have it. Run under LOCK_QUEUE, so that no two workers count the same. It visits the teams that
# wait, and no row of one at its limit.
_CLAIM_WITHIN_LIMITS = f"""
WITH RECURSIVE {_ME}, waiting AS (
  {_next_team("r.model_name >= $2")}
  UNION ALL
  SELECT n.team_id FROM waiting w CROSS JOIN LATERAL {_next_team("(r.model_name, r.team_id) > ($2, w.team_id)")} n
), running AS (
  SELECT team_id, count(*)::int AS count FROM (
    SELECT team_id FROM results
    WHERE state = 'pending' AND worker_id IS NOT NULL AND model_name = $2
    -- The order of the one index that holds running results alone.
    ORDER BY worker_id OFFSET 0) r GROUP BY team_id
), candidates AS (
  SELECT p.id, p.bytes FROM me, waiting w
  LEFT JOIN running USING (team_id)
  LEFT JOIN unnest($5::text[], $6::int[]) AS l(team_id, most) USING (team_id)
  CROSS JOIN LATERAL (
    SELECT r.id, r.priority, r.fair_key, {expected_bytes_sql("r")} AS bytes FROM results r
    WHERE r.model_name = $2 AND r.team_id = w.team_id
      AND r.state = 'pending' AND r.worker_id IS NULL
      AND (r.not_before IS NULL OR r.not_before <= now())
    ORDER BY r.priority DESC, r.fair_key, r.id
    -- `least` ignores NULL: no limit.
    LIMIT least($3::int, coalesce(l.most, $4::int)
      - least(coalesce(running.count, 0), coalesce(l.most, $4::int)))
    FOR UPDATE SKIP LOCKED
  ) p
  WHERE {without_suspects_sql("$2")}
  ORDER BY p.priority DESC, p.fair_key, p.id LIMIT $3::int
), {_within_room("$7")}
{_START_PICKED}
"""

# False while other claims of the model are not yet committed.
_LOCK_CLAIMS = f"SELECT pg_try_advisory_xact_lock({_CLAIMS_KEY.format('$1')})"

# Run under LOCK_QUEUE and _LOCK_CLAIMS, so that two workers cannot each find the model empty.
_CLAIM_SUSPECT = f"""
{_START} r.id = (
  SELECT s.id FROM results s
  WHERE s.model_name = $2 AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS}
    AND s.started_at IS NULL AND (s.not_before IS NULL OR s.not_before <= now())
  ORDER BY s.id LIMIT 1 FOR UPDATE)
AND NOT EXISTS (
  SELECT FROM results o
  WHERE o.state = 'pending' AND o.worker_id IS NOT NULL AND o.model_name = $2)
AND EXISTS (SELECT FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE)
{_CLAIMED}
"""

# By `started_at`: with `worker_id IS NULL`, the planner may look for suspects in all that waits.
_SUSPECTS_IN_TURN = f"""
SELECT m.model_name, s.team_id FROM unnest($1::text[]) AS m(model_name)
CROSS JOIN LATERAL (
  SELECT s.team_id FROM results s WHERE s.model_name = m.model_name
    AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS} AND s.started_at IS NULL
    AND (s.not_before IS NULL OR s.not_before <= now())
  ORDER BY s.id LIMIT 1) s
"""

_OWNED = """
SELECT id, attempt, cancel_requested_at IS NOT NULL AS is_cancelled FROM results
WHERE worker_id = $1 AND state = 'pending'
"""


async def claim(
    connection: Connection,
    worker_id: UUID,
    free: Mapping[str, int],
    *,
    continues: bool,
    room: int = UNBOUNDED,
) -> list[Claim]:
    """Claim up to `free[model]` results of each model, and of all as many as `room` has bytes for.

    `continues`: the text of lost attempts.
    """
    rows = await connection.fetch(CLAIM, worker_id, list(free), list(free.values()), room)
    return await _to_claims(connection, rows, continues=continues)


async def claim_within_limits(
    connection: Connection,
    worker_id: UUID,
    model: str,
    free: int,
    limits: RunningLimits,
    *,
    continues: bool,
    room: int = UNBOUNDED,
) -> list[Claim]:
    async with connection.transaction():
        await connection.execute(LOCK_QUEUE, model)
        of_teams = list(limits.of_teams), list(limits.of_teams.values())
        arguments = worker_id, model, free, limits.default, *of_teams, room
        rows = await connection.fetch(_CLAIM_WITHIN_LIMITS, *arguments)
    return await _to_claims(connection, rows, continues=continues)


async def suspects_in_turn(connection: Connection, models: Sequence[str]) -> dict[str, str]:
    """Return the models of which a suspect has its turn, with the team of the next one."""
    rows = await connection.fetch(_SUSPECTS_IN_TURN, list(models))
    return {row["model_name"]: row["team_id"] for row in rows}


async def claim_suspect(
    connection: Connection, worker_id: UUID, model: str, *, continues: bool
) -> list[Claim]:
    async with connection.transaction():
        await connection.execute(LOCK_QUEUE, model)
        if not await connection.fetchval(_LOCK_CLAIMS, model):
            return []
        rows = await connection.fetch(_CLAIM_SUSPECT, worker_id, model)
    return await _to_claims(connection, rows, continues=continues)


async def owned_results(connection: Connection, worker_id: UUID) -> dict[UUID, tuple[int, bool]]:
    """Return pending results of a worker: id -> (attempt, whether a cancellation is requested)."""
    # The heartbeat passes its own connection: no retry may delay the next renewal.
    rows = await connection.fetch(_OWNED, worker_id)
    return {row["id"]: (row["attempt"], row["is_cancelled"]) for row in rows}


async def _to_claims(
    connection: Connection, rows: Sequence[Record], *, continues: bool
) -> list[Claim]:
    interrupted = [
        Interrupted(
            id=row["id"],
            attempt=row["attempt"],
            text_attempt=row["text_attempt"],
            max_tokens=orjson.loads(row["parameters"]).get("max_tokens", 0),
            history=orjson.loads(row["attempt_history"]),
        )
        for row in rows
        if row["text_attempt"] is not None
    ]
    if continues:
        resumes = await load_resumes(connection, interrupted)
    else:
        fault = "LLM_CONTINUE_LOST_ATTEMPTS is off"
        resumes = {one.id: Resume(fault=fault) for one in interrupted}
    return [
        _to_claim(row, resumes.get(row["id"]), continues=continues)
        for row in rows
        # A row that was stored past the service may lack its context: the heartbeat hands it back,
        # until its deadline. The others run.
        if row["prompt"] is not None
    ]


def _to_claim(row: Record, resume: Resume | None, *, continues: bool) -> Claim:
    prompt, parameters = row["prompt"], orjson.loads(row["parameters"])
    return Claim(
        id=row["id"],
        attempt=row["attempt"],
        model_name=row["model_name"],
        prompt=prompt,
        parameters=parameters,
        seconds_left=row["seconds_left"],
        is_suspect=row["engine_deaths"] >= SUSPECT_DEATHS,
        has_attribution=row["attribution"] is not None,
        has_webhook=row["webhook_url"] is not None,
        team_id=row["team_id"],
        trace=row["trace"],
        resumable=row["resumable"] and continues,
        resume=resume,
        expected_bytes=expected_bytes(len(prompt), parameters),
        is_chat=row["is_chat"],
    )
