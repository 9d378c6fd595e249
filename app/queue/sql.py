"""The statements of the queue: every one that writes `results.state` is here, run by `job_queue`.

A queue is a `model_name`: a model's, or, behind a prefix that no model can have, an index's.

Every write names the state, the worker and the attempt it expects. `docs/state_machine.md` draws
the transitions.
"""

from app.core.errors import CANCELLED, DEADLINE_EXCEEDED, ENGINE_CRASHED, WORKER_LOST, Failure
from app.core.listener import (
    APPENDED,
    CANCELLED as CANCELLED_CHANNEL,
    ENDED,
    ENQUEUED,
    IDS_PER_NOTIFICATION,
    WEBHOOKS,
)
from app.queue.idempotency import take_keys_sql

# A result that was in flight at this many engine deaths runs alone from then on.
SUSPECT_DEATHS = 2
# One notification carries the ids of one statement.
MAX_BATCH = IDS_PER_NOTIFICATION
_HISTORY_LIMIT = 20
_MAX_CONTINUATIONS = 32_767  # of a smallint

# What a read of a result gives; its end gives the same to those who wait for it in its process.
READ_COLUMNS = (
    "id", "team_id", "context_id", "model_name", "model_version", "state", "output", "error_code",
    "error_message", "error_retryable", "finish_reason", "parameters", "prompt_tokens",
    "completion_tokens", "attempt", "cancel_requested_at", "started_at", "first_token_at",
    "finished_at", "metadata", "retry_of", "logprobs", "erased_at", "store", "request", "kind",
    "source_id", "attribution", "text_attempt", "continuations",
)  # fmt: skip

# The attempts whose chunks are the present text of a result `r`.
_FIRST_ATTEMPT = "coalesce(r.text_attempt, r.attempt)"
_OF_TEXT = f"c.result_id = r.id AND c.attempt BETWEEN {_FIRST_ATTEMPT} AND r.attempt"


def _failure_sql(failure: Failure) -> tuple[str, str, str]:
    quoted = failure.message.replace("'", "''")
    return f"'{failure.code}'", f"'{quoted}'", str(failure.retryable).lower()


def _by_verdict(column: int, otherwise: str) -> str:
    """A CASE that picks one column of the failure that the verdict stands for."""
    return f"""CASE j.verdict
      WHEN 'cancelled' THEN {_failure_sql(CANCELLED)[column]}
      WHEN 'expired' THEN {_failure_sql(DEADLINE_EXCEEDED)[column]}
      WHEN 'crashed' THEN {_failure_sql(ENGINE_CRASHED)[column]}
      WHEN 'worker_lost' THEN {_failure_sql(WORKER_LOST)[column]}
      WHEN 'completed' THEN NULL
      WHEN 'requeued' THEN NULL
      ELSE {otherwise} END"""


def _notify_ids(channel: str, condition: str = "true") -> str:
    """Tell a channel the ids of those rows of the statement that meet a condition, if any."""
    return f"""CASE WHEN count(*) FILTER (WHERE {condition}) > 0 THEN pg_notify('{channel}',
    string_agg(replace(id::text, '-', ''), ',') FILTER (WHERE {condition})) END"""


def _write_deliveries(ended: str) -> str:
    """A CTE that owes a delivery to each terminal row of `ended` that has a webhook."""
    return f"""deliveries AS (
  INSERT INTO webhook_deliveries (result_id, team_id, url)
  SELECT id, team_id, webhook_url FROM {ended}
  WHERE webhook_url IS NOT NULL AND state <> 'pending'
  -- No delivery may ever keep a result from its end.
  ON CONFLICT DO NOTHING RETURNING 1
)"""


def _write_undigested(ended: str) -> str:
    """A CTE that has each terminal row of `ended` counted and made searchable (`digest`)."""
    return f"""undigested AS (
  INSERT INTO undigested_results (result_id) SELECT id FROM {ended} WHERE state <> 'pending'
)"""


_NOTIFY_DELIVERIES = (
    f"CASE WHEN EXISTS (SELECT FROM deliveries) THEN pg_notify('{WEBHOOKS}', '') END"
)


def _has_sources(is_rendered: str) -> str:
    """Whether the context of a new result `i` exists, as plain text unless the prompt is rendered,
    and, of an attribution, the result that it is about.

    They are locked, the context first, as its deletion does it: what is being deleted or erased is
    waited for, and then missing.
    """
    return f"""CASE WHEN i.has_new_context OR EXISTS (
      SELECT FROM contexts c WHERE c.id = i.context_id AND c.team_id = i.team_id
        AND ({is_rendered} OR c.content IS NOT NULL) AND c.erased_at IS NULL FOR KEY SHARE)
    THEN i.source_id IS NULL OR EXISTS (
      SELECT FROM results s WHERE s.id = i.source_id AND s.team_id = i.team_id FOR KEY SHARE)
    ELSE false END"""


def _fair_key(row: str, team: str, order: str) -> str:
    """The first or last key of what waits in the queue that a row belongs to; NULL if nothing."""
    return f"""(
    SELECT q.fair_key FROM results q
    WHERE q.model_name = {row}.model_name AND {team}
      q.priority = {row}.priority AND q.state = 'pending' AND q.worker_id IS NULL
    ORDER BY q.fair_key {order} LIMIT 1)"""


def _enqueue_sql(keys: str, is_context_kept: str, is_result_kept: str) -> str:
    """The insertion of contexts and results, with what is to be done about keys before it."""
    return f"""
WITH {keys} context_input AS (
  SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[])
    AS i(id, team_id, content, messages, metadata)
), input AS (
  SELECT * FROM unnest($6::uuid[], $7::text[], $8::uuid[], $9::text[], $10::int[], $11::text[],
    $12::text[], $13::smallint[], $14::float8[], $15::text[], $16::uuid[], $17::uuid[],
    $18::text[], $19::text[], $20::float8[], $21::bool[], $22::text[], $23::bool[], $24::text[],
    $25::uuid[], $26::text[], $27::float8[], $28::text[], $29::bool[], $30::bool[])
    AS i(id, team_id, context_id, model_name, model_version, prompt, parameters, priority,
         deadline_seconds, metadata, group_id, retry_of, webhook_url, on_disconnect, step,
         has_new_context, request, store, kind, source_id, attribution, retain_seconds, trace,
         resumable, may_start)
), new_contexts AS (
  INSERT INTO contexts (id, team_id, content, messages, metadata)
  SELECT id, team_id, content, messages::jsonb, metadata::jsonb FROM context_input
  WHERE {is_context_kept}
  ON CONFLICT (id) DO NOTHING
), flows AS MATERIALIZED (
  -- Where the new results of a team begin in a queue: behind those it has there, and not before
  -- the head. Two probes of an index each; nothing is remembered of what is gone.
  SELECT f.*, greatest({_fair_key("f", "q.team_id = f.team_id AND", "DESC")} + f.step,
                       {_fair_key("f", "", "ASC")}, 0) AS first_key
  FROM (SELECT DISTINCT ON (team_id, model_name, priority) team_id, model_name, priority, step
        FROM input) f
), me AS (
  SELECT id FROM workers WHERE id = $31::uuid AND dead_at IS NULL FOR KEY SHARE
), idle AS MATERIALIZED (
  -- Models of which nothing waits: what comes now overtakes nobody.
  SELECT m.model_name, me.id AS worker_id
  FROM me, (SELECT DISTINCT model_name FROM input WHERE may_start) m
  WHERE NOT EXISTS (
    SELECT FROM results w WHERE w.model_name = m.model_name
      AND w.state = 'pending' AND w.worker_id IS NULL)
  AND NOT EXISTS (
    SELECT FROM results s WHERE s.model_name = m.model_name
      AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS})
), inserted AS (
  INSERT INTO results (id, team_id, context_id, model_name, model_version, prompt, parameters,
                       priority, deadline_at, deadline_seconds, metadata, group_id, retry_of,
                       webhook_url, on_disconnect, request, store, kind, source_id, attribution,
                       retain_seconds, trace, resumable, fair_key, worker_id, attempt, started_at)
  SELECT i.id, i.team_id, i.context_id, i.model_name, i.model_version, i.prompt,
         i.parameters::jsonb, i.priority, now() + make_interval(secs => i.deadline_seconds),
         i.deadline_seconds, i.metadata::jsonb, i.group_id, i.retry_of, i.webhook_url,
         i.on_disconnect, i.request::jsonb, i.store, i.kind, i.source_id, i.attribution::jsonb,
         i.retain_seconds, i.trace, i.resumable, f.first_key + i.step * (row_number() OVER (
           PARTITION BY i.team_id, i.model_name, i.priority ORDER BY i.id) - 1),
         idle.worker_id, (idle.worker_id IS NOT NULL)::int,
         CASE WHEN idle.worker_id IS NOT NULL THEN now() END
  FROM input i JOIN flows f USING (team_id, model_name, priority)
  LEFT JOIN idle ON i.may_start AND idle.model_name = i.model_name
  WHERE {_has_sources("i.prompt IS NOT NULL")} AND {is_result_kept}
  ON CONFLICT (id) DO NOTHING
  RETURNING id, model_name, context_id, prompt, worker_id
)
SELECT array_agg(id) AS ids,
  array_agg(id) FILTER (WHERE worker_id IS NOT NULL) AS started,
  -- The prompts that are not in the row; those of new contexts are not to be seen here yet.
  array_agg(coalesce(prompt, (SELECT content FROM contexts c WHERE c.id = context_id)))
    FILTER (WHERE worker_id IS NOT NULL) AS prompts,
  CASE WHEN count(*) FILTER (WHERE worker_id IS NULL) > 0
    THEN pg_notify('{ENQUEUED}', left(string_agg(DISTINCT model_name, ','), 7000)) END
FROM inserted
"""


ENQUEUE = _enqueue_sql("", "true", "true")
# A group's key is its first result's, after which the group is called: all of it goes with that one.
_IS_REFUSED = (
    "i.id IN (SELECT id FROM refused) OR coalesce(i.group_id IN (SELECT id FROM refused), false)"
)
ENQUEUE_WITH_KEYS = _enqueue_sql(
    take_keys_sql(32, _has_sources("i.is_rendered")),
    f"id NOT IN (SELECT i.context_id FROM input i WHERE {_IS_REFUSED})",
    f"NOT ({_IS_REFUSED})",
)

ALREADY_ENQUEUED = "SELECT id FROM results WHERE id = ANY($1::uuid[])"

_CLAIMED = """
RETURNING r.id, r.attempt, r.model_name, coalesce(r.prompt, c.content) AS prompt, r.parameters,
          extract(epoch FROM r.deadline_at - now())::float8 AS seconds_left, r.engine_deaths,
          r.attribution, r.team_id, r.trace, r.resumable, r.text_attempt,
          CASE WHEN r.text_attempt IS NOT NULL THEN r.attempt_history END AS attempt_history
"""

_START_PICKED = f"""
UPDATE results r
SET worker_id = $1, attempt = r.attempt + 1, started_at = now(), not_before = NULL
FROM contexts c
-- An array: a generic plan takes the limit for a tenth of the queue, and would join all ids.
WHERE r.id = ANY (ARRAY(SELECT id FROM picked)) AND c.id = r.context_id
{_CLAIMED}
"""


def _next_team(condition: str) -> str:
    """The first team, in the order of their ids, of which something waits for the model $2."""
    return f"""(
    SELECT r.team_id FROM results r
    WHERE r.model_name = $2 AND {condition}
      r.state = 'pending' AND r.worker_id IS NULL
    ORDER BY r.team_id LIMIT 1)"""


CLAIM = f"""
WITH me AS (
  SELECT id FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE
), picked AS (
  SELECT p.id FROM me, unnest($2::text[], $3::int[]) AS w(model_name, free)
  CROSS JOIN LATERAL (
    SELECT r.id FROM results r
    WHERE r.model_name = w.model_name
      AND r.state = 'pending' AND r.worker_id IS NULL
      AND (r.not_before IS NULL OR r.not_before <= now())
    ORDER BY r.priority DESC, r.fair_key, r.id
    LIMIT w.free FOR UPDATE SKIP LOCKED
  ) p
  WHERE NOT EXISTS (
    SELECT FROM results s WHERE s.model_name = w.model_name
      AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS})
)
{_START_PICKED}
"""

# Against those who count what runs of one model at the same moment, until the transaction ends.
LOCK_QUEUE = "SELECT pg_advisory_xact_lock(hashtext('results.model_name'), hashtext($1))"

# For a model of which teams may run only so much: $3 results, at most $4 (NULL: any number) of each
# team, or what $5 and $6 say. Run under LOCK_QUEUE, so that no two workers count the same. It visits
# the teams that wait, and no row of one that has its fill.
CLAIM_WITHIN_LIMITS = f"""
WITH RECURSIVE me AS (
  SELECT id FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE
), waiting AS (
  {_next_team("")}
  UNION ALL
  SELECT n.team_id FROM waiting w CROSS JOIN LATERAL {_next_team("r.team_id > w.team_id AND")} n
), running AS (
  SELECT team_id, count(*)::int AS count FROM results
  WHERE state = 'pending' AND worker_id IS NOT NULL AND model_name = $2 GROUP BY team_id
), picked AS (
  SELECT p.id FROM me, waiting w
  LEFT JOIN running USING (team_id)
  LEFT JOIN unnest($5::text[], $6::int[]) AS l(team_id, most) USING (team_id)
  CROSS JOIN LATERAL (
    SELECT r.id, r.priority, r.fair_key FROM results r
    WHERE r.model_name = $2 AND r.team_id = w.team_id
      AND r.state = 'pending' AND r.worker_id IS NULL
      AND (r.not_before IS NULL OR r.not_before <= now())
    ORDER BY r.priority DESC, r.fair_key, r.id
    -- Of what is NULL, `least` takes no notice: no limit.
    LIMIT least($3::int, coalesce(l.most, $4::int)
      - least(coalesce(running.count, 0), coalesce(l.most, $4::int)))
    FOR UPDATE SKIP LOCKED
  ) p
  WHERE NOT EXISTS (
    SELECT FROM results s WHERE s.model_name = $2
      AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS})
  ORDER BY p.priority DESC, p.fair_key, p.id LIMIT $3::int
)
{_START_PICKED}
"""

# Run under LOCK_QUEUE, so that two workers cannot each find the model empty.
CLAIM_SUSPECT = f"""
UPDATE results r
SET worker_id = $1, attempt = r.attempt + 1, started_at = now(), not_before = NULL
FROM contexts c
WHERE c.id = r.context_id AND r.id = (
  SELECT s.id FROM results s
  WHERE s.model_name = $2 AND s.state = 'pending' AND s.engine_deaths >= {SUSPECT_DEATHS}
    AND s.worker_id IS NULL AND (s.not_before IS NULL OR s.not_before <= now())
  ORDER BY s.id LIMIT 1 FOR UPDATE)
AND NOT EXISTS (
  SELECT FROM results o
  WHERE o.state = 'pending' AND o.worker_id IS NOT NULL AND o.model_name = $2)
AND EXISTS (SELECT FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE)
{_CLAIMED}
"""

SUSPECT_MODELS = f"""
SELECT DISTINCT model_name FROM results
WHERE state = 'pending' AND engine_deaths >= {SUSPECT_DEATHS} AND worker_id IS NULL
  AND model_name = ANY($1::text[])
"""


def _lock_named(strength: str, condition: str = "true") -> str:
    """A CTE of the rows that $2 names, locked in the order of their ids.

    By their ids alone: told their worker and state as well, the planner reads all rows of the worker,
    and those of its past that are not swept yet, for each that is named.
    """
    return f"""locked AS MATERIALIZED (
  SELECT id, worker_id, attempt, state, cancel_requested_at, deadline_at, lost_attempts,
    engine_deaths
  FROM results WHERE id = ANY($2::uuid[]) AND {condition} ORDER BY id FOR {strength}
)"""


APPEND = f"""
WITH {_lock_named("SHARE")}, kept AS (
  INSERT INTO result_chunks (result_id, attempt, "offset", text, prompt_tokens, completion_tokens,
                             logprobs, token_ids)
  SELECT i.result_id, i.attempt, i."offset", i.text, i.prompt_tokens, i.completion_tokens,
         i.logprobs, i.token_ids
  FROM (
    SELECT u.* FROM unnest($2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::int[], $7::int[],
                           $8::text[], $9::bytea[])
      AS u(result_id, attempt, "offset", text, prompt_tokens, completion_tokens, logprobs,
           token_ids)
    JOIN locked r ON r.id = u.result_id
    WHERE r.worker_id = $1 AND r.attempt = u.attempt AND r.state = 'pending'
  ) i
  ON CONFLICT DO NOTHING
)
SELECT pg_notify('{APPENDED}', ids) FROM unnest($10::text[]) AS told(ids)
"""

# A requeued result keeps its text: its chunks stay, and its next attempt continues them. An attempt
# without text of its own leaves the text as it is.
_KEEPS_TEXT = "j.verdict = 'requeued' AND j.keeps_text AND r.resumable"

# Writes the verdict `j` on the rows `r`: the one place where a result leaves its attempt.
_CONCLUDE = f"""
  UPDATE results r SET
    state = CASE WHEN j.verdict = 'requeued' THEN 'pending'
                 WHEN j.verdict = 'completed' THEN 'completed' ELSE 'failed' END,
    worker_id = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE r.worker_id END,
    started_at = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE r.started_at END,
    first_token_at = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE
      r.started_at + make_interval(secs => j.first_token_seconds) END,
    finished_at = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE clock_timestamp() END,
    expires_at = CASE WHEN j.verdict <> 'requeued'
      THEN clock_timestamp() + make_interval(secs => r.retain_seconds) END,
    -- To the front: among equal keys the oldest goes first.
    fair_key = CASE WHEN j.verdict = 'requeued'
      THEN coalesce({_fair_key("r", "", "ASC")}, 0) ELSE r.fair_key END,
    not_before = CASE WHEN j.verdict = 'requeued'
      THEN now() + make_interval(secs => j.retry_after_seconds) END,
    lost_attempts = r.lost_attempts + j.lost::int,
    engine_deaths = r.engine_deaths + j.engine_died::int,
    attempt_history = CASE
      WHEN (j.error_code IS NULL AND j.continued_from IS NULL)
        OR jsonb_array_length(r.attempt_history) >= {_HISTORY_LIMIT}
      THEN r.attempt_history
      ELSE r.attempt_history || jsonb_build_object('attempt', r.attempt, 'worker_id', r.worker_id,
        'started_at', r.started_at, 'ended_at', clock_timestamp(),
        'counted', j.lost OR j.verdict = 'completed', 'continued_from', j.continued_from,
        'error', CASE WHEN j.error_code IS NOT NULL
          THEN jsonb_build_object('code', j.error_code, 'message', j.error_message) END) END,
    text_attempt = CASE
      WHEN {_KEEPS_TEXT}
        THEN coalesce(r.text_attempt, CASE WHEN j.output <> '' THEN r.attempt END)
      WHEN j.verdict = 'requeued' THEN NULL
      ELSE r.text_attempt END,
    continuations = CASE WHEN j.verdict = 'requeued' AND NOT ({_KEEPS_TEXT}) THEN 0
      ELSE least(r.continuations + j.continued::int, {_MAX_CONTINUATIONS}) END,
    model_version = coalesce(j.model_version, r.model_version),
    output = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.output END,
    finish_reason = CASE WHEN j.verdict = 'requeued' THEN NULL
                         WHEN j.verdict = 'completed' THEN j.finish_reason
                         WHEN j.verdict = 'cancelled' THEN 'cancelled' ELSE 'error' END,
    prompt_tokens = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.prompt_tokens END,
    completion_tokens = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.completion_tokens END,
    logprobs = CASE WHEN j.verdict = 'requeued' THEN NULL ELSE j.logprobs::jsonb END,
    error_code = {_by_verdict(0, "j.error_code")},
    error_message = {_by_verdict(1, "j.error_message")},
    error_retryable = {_by_verdict(2, "j.error_retryable")}
  FROM judged j WHERE r.id = j.id
"""


# An attribution refers to its source's context, which is to be locked before results are: who deletes
# a context does it in this order.
_HOLD_CONTEXTS = """held AS MATERIALIZED (
  SELECT id FROM contexts WHERE id IN (SELECT context_id FROM results WHERE id = ANY($2::uuid[]))
  ORDER BY id FOR KEY SHARE
), """
_CONTEXTS_ARE_HELD = "(SELECT count(*) FROM held) >= 0"

# The attributions that completed texts were sent with: results of their own from now on. Of those
# of one team that are stored at once, each stands a step behind the other.
_ATTRIBUTE = f"""due AS (
  SELECT e.id, e.team_id, e.context_id, e.output, e.priority, e.webhook_url, e.store,
    e.retain_seconds, e.trace, e.attribution, e.attribution ->> 'queue' AS model_name, 1 / coalesce(
    (SELECT l.weight FROM team_limits l WHERE l.team_id = e.team_id AND l.weight IS NOT NULL
       AND l.model_name IN (e.attribution ->> 'queue', '*')
     ORDER BY l.model_name = '*' LIMIT 1), 1) AS step
  FROM ended e WHERE e.state = 'completed' AND e.attribution IS NOT NULL
), attributions AS (
  INSERT INTO results (id, team_id, kind, context_id, source_id, model_name, prompt, parameters,
                       priority, deadline_at, deadline_seconds, webhook_url, store, retain_seconds,
                       trace, fair_key)
  SELECT (d.attribution ->> 'id')::uuid, d.team_id, 'attribution', d.context_id, d.id, d.model_name,
         d.output, d.attribution -> 'parameters', d.priority,
         now() + make_interval(secs => (d.attribution ->> 'deadline_seconds')::float8),
         (d.attribution ->> 'deadline_seconds')::float8, d.webhook_url, d.store,
         d.retain_seconds, d.trace,
         greatest({_fair_key("d", "q.team_id = d.team_id AND", "DESC")} + d.step,
                  {_fair_key("d", "", "ASC")}, 0) + d.step * (row_number() OVER (
           PARTITION BY d.team_id, d.model_name, d.priority ORDER BY d.id) - 1)
  FROM due d
  ON CONFLICT (id) DO NOTHING RETURNING model_name
), """


# Of a result that waits for an attempt to continue its text, nothing is removed.
_SWEPT = """swept AS (
  DELETE FROM result_chunks c USING ended e
  WHERE c.result_id = e.id AND (e.state <> 'pending' OR e.text_attempt IS NULL)
)"""


def _end_attempts_sql(*, reads: bool, attributes: bool) -> str:
    """The end of a batch of attempts; it answers the ids of those that were ours.

    `reads`: and what a read of those gives that $20 names. `attributes`: some of them, once they
    have completed, are to be attributed. What a batch does not need is no part of its statement: it
    would copy each row with all its text.
    """
    returned = ["id", "state", "team_id", "webhook_url", "text_attempt"]
    if attributes:
        returned += ["attribution", "context_id", "priority", "output", "store"]
        returned += ["retain_seconds", "trace"]
    if reads:
        returned += READ_COLUMNS
    columns = ", ".join(f"r.{column}" for column in dict.fromkeys(returned))
    answer = "SELECT * FROM told"
    if reads:
        answer += " LEFT JOIN ended e ON e.id = ANY($20::uuid[]) AND e.state <> 'pending'"
    locked = _lock_named("UPDATE", _CONTEXTS_ARE_HELD if attributes else "true")
    enqueued = (
        f"""CASE WHEN EXISTS (SELECT FROM attributions)
      THEN pg_notify('{ENQUEUED}',
        (SELECT left(string_agg(DISTINCT model_name, ','), 7000) FROM attributions))
      END"""
        if attributes
        else "NULL"
    )
    return f"""
WITH {_HOLD_CONTEXTS if attributes else ""}{locked}, input AS (
  SELECT * FROM unnest($2::uuid[], $3::int[], $4::text[], $5::text[], $6::text[], $7::int[],
    $8::int[], $9::text[], $10::int[], $11::float8[], $12::text[], $13::text[], $14::bool[],
    $15::float8[], $16::bool[], $17::bool[], $18::bigint[])
    AS i(result_id, attempt, outcome, output, finish_reason, prompt_tokens, completion_tokens,
         logprobs, model_version, first_token_seconds, error_code, error_message, error_retryable,
         retry_after_seconds, keeps_text, continued, continued_from)
), judged AS (
  SELECT r.id, i.*, i.outcome = 'lost' AS lost, i.outcome = 'lost' AS engine_died,
    CASE
      WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
      WHEN i.outcome IN ('completed', 'failed') THEN i.outcome
      WHEN r.deadline_at <= now() THEN 'expired'
      WHEN i.outcome = 'lost' AND r.lost_attempts + 1 >= $19::int THEN
        CASE WHEN r.engine_deaths >= {SUSPECT_DEATHS} THEN 'crashed' ELSE 'failed' END
      ELSE 'requeued' END AS verdict
  FROM input i JOIN locked r ON r.id = i.result_id
  WHERE r.worker_id = $1 AND r.attempt = i.attempt AND r.state = 'pending'
), ended AS ({_CONCLUDE} RETURNING {columns}), {_SWEPT}, {_ATTRIBUTE if attributes else ""}{_write_deliveries("ended")}, {_write_undigested("ended")}, told AS (
  SELECT array_agg(id) AS ids, {_notify_ids(ENDED, "state <> 'pending'")} AS ended,
    {_NOTIFY_DELIVERIES} AS deliveries, {enqueued} AS enqueued
  FROM ended
)
{answer}
"""


# By whether it reads, and whether it attributes.
END_ATTEMPTS = {
    (reads, attributes): _end_attempts_sql(reads=reads, attributes=attributes)
    for reads in (False, True)
    for attributes in (False, True)
}

ALREADY_ENDED = """
SELECT r.id FROM results r
JOIN unnest($2::uuid[], $3::int[]) AS i(id, attempt) ON r.id = i.id
WHERE r.attempt = i.attempt AND (r.worker_id = $1 AND r.state <> 'pending' OR r.worker_id IS NULL)
"""

CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8 AS seconds"

# A lease that is over, or longer than any (LLM_LEASE_SECONDS is ten minutes at most): who had it did
# not renew it since the clock was set back.
LOST_WORKERS = """
SELECT id FROM workers
WHERE dead_at IS NULL
  AND (lease_expires_at < now() OR lease_expires_at > now() + interval '20 minutes')
  AND pg_postmaster_start_time() + make_interval(secs => $1) < now()
ORDER BY id LIMIT 10 FOR UPDATE SKIP LOCKED
"""

# The rows of dead workers ($1), whose text survives in the chunks. $2: whether the attempts count.
# $4: whether their text may be continued; $5: also where ids of tokens are missing.
RELEASE = f"""
WITH picked AS MATERIALIZED (
  -- In no order: ordered by id, the planner walks all results in the hope of a common owner.
  SELECT id FROM results
  WHERE worker_id = ANY($1::uuid[]) AND state = 'pending' LIMIT {MAX_BATCH}
), judged AS (
  SELECT r.id, r.attempt, $2::bool AS lost, false AS engine_died,
    CASE
      WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
      WHEN r.deadline_at <= now() THEN 'expired'
      -- Its client reads a stream that cannot begin anew, or has left.
      WHEN $2::bool AND (r.lost_attempts + 1 >= $3::int OR r.on_disconnect = 'cancel')
        THEN 'worker_lost'
      ELSE 'requeued' END AS verdict,
    coalesce((SELECT string_agg(c.text, '' ORDER BY c."offset") FROM result_chunks c
              WHERE {_OF_TEXT}), '') AS output,
    (SELECT max(c.prompt_tokens) FROM result_chunks c WHERE {_OF_TEXT}) AS prompt_tokens,
    (SELECT max(c.completion_tokens) FROM result_chunks c WHERE {_OF_TEXT}) AS completion_tokens,
    $4::bool AND ($5::bool OR (
      SELECT coalesce(sum(octet_length(c.token_ids)), 0) = 4 * coalesce(max(c.completion_tokens), 0)
      FROM result_chunks c WHERE {_OF_TEXT})) AS keeps_text,
    r.text_attempt IS NOT NULL AND EXISTS (SELECT FROM result_chunks c
      WHERE c.result_id = r.id AND c.attempt = r.attempt) AS continued,
    (SELECT max(c."offset" + char_length(c.text)) FROM result_chunks c
     WHERE {_OF_TEXT} AND c.attempt < r.attempt) AS continued_from,
    NULL::text AS finish_reason, NULL::text AS logprobs, NULL::int AS model_version,
    NULL::float8 AS first_token_seconds, 0::float8 AS retry_after_seconds,
    CASE WHEN $2::bool THEN {_failure_sql(WORKER_LOST)[0]} END AS error_code,
    'The worker stopped renewing its lease.' AS error_message, true AS error_retryable
  FROM picked p JOIN results r ON r.id = p.id
  WHERE r.worker_id = ANY($1::uuid[]) AND r.state = 'pending'
  ORDER BY r.id FOR UPDATE OF r
), ended AS ({_CONCLUDE} RETURNING r.id, r.state, r.team_id, r.webhook_url, r.text_attempt),
{_SWEPT}, {_write_deliveries("ended")}, {_write_undigested("ended")}
SELECT count(*) AS released, CASE WHEN count(*) > 0 THEN pg_notify('{ENQUEUED}', '') END,
  {_notify_ids(ENDED, "state <> 'pending'")}, {_NOTIFY_DELIVERIES}
FROM ended
"""

# The kept text of a row `p` that ends while it waits to be continued.
_KEPT = """LEFT JOIN LATERAL (
    SELECT string_agg(c.text, '' ORDER BY c."offset") AS output,
      max(c.prompt_tokens) AS prompt_tokens, max(c.completion_tokens) AS completion_tokens
    FROM result_chunks c
    WHERE c.result_id = p.id AND c.attempt BETWEEN p.text_attempt AND p.attempt
  ) kept ON p.worker_id IS NULL AND p.text_attempt IS NOT NULL"""
_KEPT_COLUMNS = """output = kept.output, prompt_tokens = kept.prompt_tokens,
    completion_tokens = kept.completion_tokens"""

# Unclaimed rows end at once; running ones are marked, and their owner is told.
CANCEL = f"""
WITH picked AS (
  SELECT id, worker_id, attempt, text_attempt FROM results WHERE {{where}} AND state = 'pending'
  ORDER BY id LIMIT {MAX_BATCH} FOR UPDATE
), cancelled AS (
  UPDATE results r SET
    cancel_requested_at = coalesce(r.cancel_requested_at, now()),
    state = CASE WHEN p.worker_id IS NULL THEN 'failed' ELSE 'pending' END,
    finished_at = CASE WHEN p.worker_id IS NULL THEN now() END,
    expires_at = CASE WHEN p.worker_id IS NULL
      THEN now() + make_interval(secs => r.retain_seconds) END,
    finish_reason = CASE WHEN p.worker_id IS NULL THEN 'cancelled' END,
    error_code = CASE WHEN p.worker_id IS NULL THEN {_failure_sql(CANCELLED)[0]} END,
    error_message = CASE WHEN p.worker_id IS NULL THEN {_failure_sql(CANCELLED)[1]} END,
    error_retryable = CASE WHEN p.worker_id IS NULL THEN {_failure_sql(CANCELLED)[2]} END,
    {_KEPT_COLUMNS}
  FROM picked p {_KEPT}
  WHERE r.id = p.id
  RETURNING r.id, r.state, r.team_id, r.webhook_url, r.text_attempt
), ended AS (
  SELECT * FROM cancelled WHERE state <> 'pending'
), {_SWEPT}, {_write_deliveries("cancelled")}, {_write_undigested("cancelled")}
SELECT count(*) AS cancelled, {_notify_ids(ENDED, "state = 'failed'")},
  {_notify_ids(CANCELLED_CHANNEL, "state = 'pending'")}, {_NOTIFY_DELIVERIES}
FROM cancelled
"""

EXPIRE = f"""
WITH picked AS MATERIALIZED (
  SELECT id, worker_id, attempt, text_attempt FROM results
  WHERE state = 'pending' AND worker_id IS NULL AND deadline_at <= now()
  ORDER BY deadline_at LIMIT {MAX_BATCH} FOR UPDATE SKIP LOCKED
), ended AS (
  UPDATE results r SET state = 'failed', finished_at = now(), finish_reason = 'error',
    expires_at = now() + make_interval(secs => r.retain_seconds),
    error_code = {_failure_sql(DEADLINE_EXCEEDED)[0]},
    error_message = {_failure_sql(DEADLINE_EXCEEDED)[1]},
    error_retryable = {_failure_sql(DEADLINE_EXCEEDED)[2]},
    {_KEPT_COLUMNS}
  FROM picked p {_KEPT}
  WHERE r.id = p.id
  RETURNING r.id, r.state, r.team_id, r.webhook_url, r.text_attempt
), {_SWEPT}, {_write_deliveries("ended")}, {_write_undigested("ended")}
SELECT count(*) AS ended, {_notify_ids(ENDED)}, {_NOTIFY_DELIVERIES} FROM ended
"""

TELL_STOPPED = f"""
SELECT {_notify_ids(CANCELLED_CHANNEL)}, {_notify_ids(ENDED)} FROM unnest($1::uuid[]) AS i(id)
"""

STILL_OURS = """
SELECT id, attempt, cancel_requested_at IS NOT NULL AS is_cancelled FROM results
WHERE worker_id = $1 AND state = 'pending'
"""
