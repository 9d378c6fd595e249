"""The two ways out of the pending state: a result ends, or it returns to the queue.

`results.state` is written here, for every end, and by the insertion of new results in `enqueue` and
`finish`.
"""

from collections.abc import Callable

from app.core.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    ENGINE_CRASHED,
    NOT_TRIED,
    WORKER_LOST,
    Failure,
)
from app.core.listener import ENDED, IDS_PER_NOTIFICATION
from app.queue.notifications import NOTIFY_DELIVERIES, notify_ids
from app.queue.virtual_time import first_key_sql

# One notification carries the ids of one statement.
MAX_BATCH = IDS_PER_NOTIFICATION
_HISTORY_LIMIT = 20
_MAX_CONTINUATIONS = 32_767  # of a smallint

# The attempts whose chunks are the present text of a result `r`.
_FIRST_ATTEMPT = "coalesce(r.text_attempt, r.attempt)"
OF_TEXT = f"c.result_id = r.id AND c.attempt BETWEEN {_FIRST_ATTEMPT} AND r.attempt"

# The rest of a verdict on a result whose attempt, if it had one, returned nothing.
NO_ANSWER = """NULL::text AS finish_reason, NULL::text AS logprobs,
    NULL::text AS prompt_logprobs, NULL::bytea AS vector, NULL::int AS model_version,
    NULL::float8 AS first_token_seconds, 0::float8 AS retry_after_seconds"""


# Verdicts that replace the attempt's own failure, if it had one.
_FAILURES = {
    "cancelled": CANCELLED,
    "expired": DEADLINE_EXCEEDED,
    "crashed": ENGINE_CRASHED,
    "worker_lost": WORKER_LOST,
    "not_tried": NOT_TRIED,
}


def _failure_sql(verdict: str, literal: Callable[[Failure], str], otherwise: str) -> str:
    cases = (f"WHEN '{name}' THEN {literal(one)}" for name, one in _FAILURES.items())
    return f"CASE {verdict} {' '.join(cases)} ELSE {otherwise} END"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _count_attempt_sql(verdict: str) -> str:
    return f"""
    lost_attempts = r.lost_attempts + j.lost::int,
    engine_deaths = r.engine_deaths + j.engine_died::int,
    model_version = coalesce(j.model_version, r.model_version),
    attempt_history = CASE
      WHEN (j.error_code IS NULL AND j.continued_from IS NULL)
        OR jsonb_array_length(r.attempt_history) >= {_HISTORY_LIMIT}
      THEN r.attempt_history
      ELSE r.attempt_history || jsonb_build_object('attempt', r.attempt, 'worker_id', r.worker_id,
        'started_at', r.started_at, 'ended_at', clock_timestamp(),
        'counted', j.lost OR {verdict} = 'completed', 'continued_from', j.continued_from,
        'error', CASE WHEN j.error_code IS NOT NULL
          THEN jsonb_build_object('code', j.error_code, 'message', j.error_message) END) END"""


_CONTINUATIONS = f"least(r.continuations + j.continued::int, {_MAX_CONTINUATIONS})"
# A requeued result keeps its text: its chunks stay, and its next attempt continues them. An attempt
# without text of its own leaves the text as it is.
_KEEPS_TEXT = "j.keeps_text AND r.resumable"


def _end_sql(judged: str, verdict: str, sets: str) -> str:
    return f"""
  UPDATE results r SET {_count_attempt_sql(verdict)},
    state = CASE {verdict} WHEN 'completed' THEN 'completed' ELSE 'failed' END,
    cancel_requested_at = CASE {verdict}
      WHEN 'cancelled' THEN coalesce(r.cancel_requested_at, now()) ELSE r.cancel_requested_at END,
    first_token_at = r.started_at + make_interval(secs => j.first_token_seconds),
    finished_at = clock_timestamp(),
    expires_at = clock_timestamp() + make_interval(secs => r.retain_seconds),
    not_before = NULL,
    continuations = {_CONTINUATIONS},
    output = j.output, logprobs = j.logprobs::jsonb,
    prompt_logprobs = j.prompt_logprobs, vector = j.vector,
    prompt_tokens = j.prompt_tokens, completion_tokens = j.completion_tokens,
    finish_reason = CASE {verdict} WHEN 'completed' THEN j.finish_reason
      WHEN 'cancelled' THEN 'cancelled' ELSE 'error' END,
    error_code = {_failure_sql(verdict, lambda one: _quote(one.code), "j.error_code")},
    error_message = {_failure_sql(verdict, lambda one: _quote(one.message), "j.error_message")},
    error_retryable = {_failure_sql(verdict, lambda one: str(one.retryable), "j.error_retryable")}{sets and f", {sets}"}
  FROM {judged}"""


_REQUEUE = f"""
  UPDATE results r SET {_count_attempt_sql("j.verdict")},
    worker_id = NULL, started_at = NULL,
    not_before = now() + make_interval(secs => j.retry_after_seconds),
    -- To the front: among equal keys the oldest goes first.
    fair_key = coalesce({first_key_sql("r")}, 0),
    text_attempt = CASE WHEN {_KEEPS_TEXT}
      THEN coalesce(r.text_attempt, CASE WHEN j.output <> '' THEN r.attempt END) END,
    continuations = CASE WHEN {_KEEPS_TEXT} THEN {_CONTINUATIONS} ELSE 0 END
  FROM judged j WHERE r.id = j.id AND j.verdict = 'requeued'"""


_ENDED_COLUMNS = "r.id, r.team_id, r.webhook_url"
# The source of an update that ends results, as `j`, and the verdict on each of them.
JUDGED = "judged j WHERE r.id = j.id AND j.verdict <> 'requeued'", "j.verdict"


def end_sql(
    columns: str = _ENDED_COLUMNS,
    judged: str = JUDGED[0],
    verdict: str = JUDGED[1],
    *,
    delivers: bool = True,
    sets: str = "",
) -> str:
    """CTEs that end the results `judged`; `ended` has their `columns`.

    `delivers`: some may have a webhook. `sets`: a further assignment.
    """
    return f"""ended AS ({_end_sql(judged, verdict, sets)}
  RETURNING {columns}
), {_DELIVER if delivers else ""}undigested AS (
  INSERT INTO undigested_results (result_id) SELECT id FROM ended
)"""


_DELIVER = """deliveries AS (
  INSERT INTO webhook_deliveries (result_id, team_id, url)
  SELECT id, team_id, webhook_url FROM ended WHERE webhook_url IS NOT NULL
  -- A delivery must not keep a result from its end.
  ON CONFLICT DO NOTHING RETURNING 1
), """


def conclude_sql(
    columns: str = _ENDED_COLUMNS,
    judged: str = JUDGED[0],
    verdict: str = JUDGED[1],
    *,
    requeues: bool = True,
    delivers: bool = True,
    sweeps: bool = True,
) -> str:
    """CTEs that end or requeue the results `judged`, by their verdicts; both are `concluded`.

    `requeues`: some may be requeued; such a result keeps the chunks that its next attempt continues.
    `sweeps`: some may have chunks.
    """
    ended = end_sql(columns, judged, verdict, delivers=delivers)
    if not requeues:
        swept = f"{sweep_sql('SELECT id FROM ended')}, " if sweeps else ""
        return f"{ended}, {swept}concluded AS (SELECT id, true AS has_ended FROM ended)"
    return f"""{ended}, requeued AS ({_REQUEUE}
  RETURNING r.id, r.text_attempt
), {sweep_sql("SELECT id FROM ended UNION ALL SELECT id FROM requeued WHERE text_attempt IS NULL")},
concluded AS (
  SELECT id, true AS has_ended FROM ended UNION ALL SELECT id, false FROM requeued
)"""


def sweep_sql(ids: str) -> str:
    """A CTE that removes the chunks of results. An array: a join may read all chunks instead."""
    return f"""swept AS (
  DELETE FROM result_chunks WHERE result_id = ANY (ARRAY({ids}))
)"""


def notify_concluded(*, delivers: bool = True) -> str:
    deliveries = NOTIFY_DELIVERIES if delivers else "NULL"
    return f"{notify_ids(ENDED, 'has_ended')} AS ended, {deliveries} AS deliveries"


# Verdicts on the unclaimed results `p`: their kept text is their answer.
JUDGE_UNCLAIMED = f"""p.id, kept.*, {NO_ANSWER}, false AS lost, false AS engine_died,
    false AS continued, NULL::bigint AS continued_from,
    NULL::text AS error_code, NULL::text AS error_message, NULL::bool AS error_retryable
  FROM picked p LEFT JOIN LATERAL (
    SELECT string_agg(c.text, '' ORDER BY c."offset") AS output,
      max(c.prompt_tokens) AS prompt_tokens, max(c.completion_tokens) AS completion_tokens
    FROM result_chunks c
    WHERE c.result_id = p.id AND c.attempt BETWEEN p.text_attempt AND p.attempt
  ) kept ON p.text_attempt IS NOT NULL
  WHERE p.worker_id IS NULL"""
