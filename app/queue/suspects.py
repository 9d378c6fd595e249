"""Bounds of suspects: results that were in flight at two deaths of an engine or worker run alone (`claim`).

A suspect that runs, and the death that it may cause, take the model from all others. So after each one they
have it for as long. A team whose results ended engines or workers often has no more suspects that are tried.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from app.core.database import Connection
from app.core.ids import lowest_id
from app.core.listener import ENDED
from app.queue.claim import SUSPECT_DEATHS
from app.queue.notifications import NOTIFY_DELIVERIES, notify_ids
from app.queue.terminal_state import JUDGE_UNCLAIMED, MAX_BATCH, end_sql, sweep_sql

# Results of a team on a model that failed within an hour, each by deaths at which it ran alone.
MOST_KILLERS = 5
_KILLERS_HOURS, _KILLERS_DAYS = 1, 1  # since their end, and since they were sent
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 2.0, 600.0
OWN_PAUSES = 4

# By `started_at`, see `claim`. $3 seconds; $4 for the suspects of the team $2. No pause if nothing else waits.
_PAUSE = f"""
WITH picked AS MATERIALIZED (
  SELECT id FROM results
  WHERE model_name = $1 AND state = 'pending' AND engine_deaths >= {SUSPECT_DEATHS} AND started_at IS NULL
    AND (
      SELECT o.id FROM results o
      WHERE o.model_name = $1 AND o.state = 'pending' AND o.worker_id IS NULL AND o.engine_deaths < {SUSPECT_DEATHS}
      ORDER BY o.priority DESC, o.fair_key, o.id LIMIT 1) IS NOT NULL
  ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE results r SET not_before = greatest(r.not_before, clock_timestamp()
  + make_interval(secs => CASE WHEN r.team_id = $2 THEN $4::float8 ELSE $3::float8 END))
WHERE r.id = ANY (ARRAY(SELECT id FROM picked))
"""

# $3: the first id that counts. A result that failed at its last attempt ran alone if it died more often than
# a suspect does; one that is ended here did not.
_KILLERS = f"""
SELECT count(*) FROM unnest(ARRAY['engine_crashed', 'worker_lost']) AS c(code) CROSS JOIN LATERAL (
  SELECT FROM results k
  WHERE k.team_id = $2 AND k.error_code = c.code AND k.id >= $3
    AND k.model_name = $1 AND k.engine_deaths > {SUSPECT_DEATHS}
    AND k.finished_at > now() - interval '{_KILLERS_HOURS} h'
  ORDER BY k.id DESC LIMIT {MOST_KILLERS}) k
"""
# By ids: with the team as a condition, the planner may read all that waits of it.
_END_SUSPECTS = f"""
WITH picked AS MATERIALIZED (
  SELECT id, worker_id, attempt, text_attempt FROM results
  WHERE started_at IS NULL AND state = 'pending' AND id = ANY (ARRAY(
    SELECT s.id FROM (
      SELECT id, team_id FROM results
      WHERE model_name = $1 AND state = 'pending' AND engine_deaths >= {SUSPECT_DEATHS} AND started_at IS NULL
      OFFSET 0) s
    WHERE s.team_id = $2 ORDER BY s.id LIMIT {MAX_BATCH}))
  ORDER BY id FOR UPDATE SKIP LOCKED
), judged AS (
  SELECT 'not_tried' AS verdict, {JUDGE_UNCLAIMED}
), {end_sql()}, {sweep_sql("SELECT id FROM ended")}
SELECT count(*), {notify_ids(ENDED)}, {NOTIFY_DELIVERIES} FROM ended
"""

# Suspects that run on workers, and for how long.
_RUNNING = f"""
SELECT model_name, team_id, coalesce(max(extract(epoch FROM clock_timestamp() - started_at)), 0)::float8 AS seconds
FROM results WHERE worker_id = ANY($1::uuid[]) AND state = 'pending' AND engine_deaths >= {SUSPECT_DEATHS}
GROUP BY model_name, team_id
"""


async def pause_suspects(connection: Connection, model: str, team_id: str, seconds: float) -> None:
    """Keep suspects waiting after one of the team had the model for so long: others that wait have it as long.

    The team's own ones wait several times as long, so that many of them take no more of the model's time
    than one; none of them is tried any more if too many have ended engines or workers.
    """
    first = lowest_id(datetime.now(UTC) - timedelta(days=_KILLERS_DAYS))
    if await connection.fetchval(_KILLERS, model, team_id, first) >= MOST_KILLERS:
        while await end_suspects(connection, model, team_id) == MAX_BATCH:
            pass
    pause = min(max(seconds, LEAST_PAUSE_SECONDS), MOST_PAUSE_SECONDS)
    await connection.execute(_PAUSE, model, team_id, pause, OWN_PAUSES * pause)


async def end_suspects(connection: Connection, model: str, team_id: str) -> int:
    """End some suspects of a team that are not to be tried; how many."""
    count: int = await connection.fetchval(_END_SUSPECTS, model, team_id)
    return count


async def running_suspects(
    connection: Connection, worker_ids: Sequence[UUID]
) -> list[tuple[str, str, float]]:
    """Return model and team of each suspect that these workers run, and its seconds so far."""
    rows = await connection.fetch(_RUNNING, worker_ids)
    return [(row["model_name"], row["team_id"], row["seconds"]) for row in rows]
