"""The statement that stores new results, made of the parts that a batch needs.

Each part costs PostgreSQL some microseconds in every statement that has it, used or not.
"""

from dataclasses import dataclass
from typing import Any

from app.core.record_set import RecordSet
from app.queue.claim import may_claim_sql, without_suspects_sql
from app.queue.idempotency import take_keys_sql
from app.queue.job_rows import COUNT_ROWS, take_rows_sql
from app.queue.notifications import notify_enqueued
from app.queue.team_limits import without_running_limits_sql
from app.queue.virtual_time import is_queue_empty_sql, next_key_sql, step_behind_sql


@dataclass(slots=True, frozen=True)
class Parts:
    """The parts that a batch needs."""

    is_one: bool  # a single result, whose values are scalars
    keys: bool
    new_contexts: bool
    stored_contexts: bool
    sources: bool  # of attributions
    starts: bool  # a worker, $1, that may claim some of them
    jobs: bool = False  # of which some are rows
    replaces: bool = False  # retried rows of jobs
    reuses: bool = False  # some may be answered by an equal result, now or later


# A group has the id of its first result, and that one's key: it is stored whole or not at all.
_IS_REFUSED = (
    "i.id IN (SELECT id FROM refused) OR coalesce(i.group_id IN (SELECT id FROM refused), false)"
)

# The worker $1 for a flow, if its model's queue is empty: a new result overtakes no other.
_STARTER = f"""(
    SELECT me.id FROM me
    WHERE f.may_start AND {may_claim_sql("f.model_name")} AND {is_queue_empty_sql("f.model_name")}
    AND {without_suspects_sql("f.model_name")}
    AND {without_running_limits_sql("f.model_name", "f.team_id")})"""
_ME = """me AS (
  SELECT id FROM workers WHERE id = $1::uuid AND dead_at IS NULL FOR KEY SHARE
), """
# Not the clock: their attempts began with this statement, which may wait for locks.
_CLAIMED = """i.worker_id, (i.worker_id IS NOT NULL)::int,
         CASE WHEN i.worker_id IS NOT NULL THEN now() END"""
# Prompts from stored contexts; this statement does not see its new ones.
_STARTED = """array_agg(id) FILTER (WHERE worker_id IS NOT NULL) AS started,
  array_agg((SELECT content FROM contexts c WHERE c.id = context_id AND prompt IS NULL))
    FILTER (WHERE worker_id IS NOT NULL) AS prompts,
  """


def enqueue_sql(
    parts: Parts,
    contexts: RecordSet[Any],
    results: RecordSet[Any],
    forms: RecordSet[Any],
    flows: RecordSet[Any],
) -> str:
    """Insert contexts and results; the parameters are the worker, these sets, and the prompts.

    A result has values of its own, those of its form, and those of its flow.
    """
    first_context = 1 + parts.starts
    first_result = first_context + len(contexts.types) * parts.new_contexts
    first_form = first_result + len(results.types)
    first_flow = first_form + len(forms.types)
    prompts = first_flow + len(flows.types)
    has_sources = _has_sources(parts)
    is_context_kept = is_result_kept = "true"
    keys = new_contexts = ""
    if parts.keys or parts.jobs:
        keys = _take_keys_sql(parts, has_sources)
        is_context_kept = f"id NOT IN (SELECT i.context_id FROM input i WHERE {_IS_REFUSED})"
        is_result_kept = f"NOT ({_IS_REFUSED})"
    if parts.new_contexts:
        new_contexts = f"""new_contexts AS (
  INSERT INTO contexts ({", ".join(contexts.types)})
  SELECT * FROM ({contexts.select(first_context, is_one=parts.is_one)}) c WHERE {is_context_kept}
  -- Sent again, it may be there and be deleted meanwhile: its row is locked, or inserted after that.
  ON CONFLICT (id) DO UPDATE SET team_id = contexts.team_id
), """
    starter = f", {_STARTER} AS starter" if parts.starts else ""
    own = ["id", "context_id", "prompt"]
    own += ["job_id"] * parts.jobs + ["reuse_digest"] * parts.reuses
    stored = ", ".join((*own, *forms.types))
    return f"""
WITH input AS (
  SELECT i.*, {forms.columns(first_form, None if parts.is_one else "i.form")},
    (${prompts}::text[])[i.prompt_place] AS prompt
  FROM ({results.select(first_result, is_one=parts.is_one)}) i
), {keys}{new_contexts}{_ME if parts.starts else ""}flows AS MATERIALIZED (
  SELECT f.place, f.step, {next_key_sql("f")} AS first_key{starter}
  FROM ({flows.select(first_flow, is_one=parts.is_one)}) f
), inserted AS (
  INSERT INTO results ({stored}, deadline_at, fair_key{", worker_id, attempt, started_at" if parts.starts else ""})
  SELECT {stored}, now() + make_interval(secs => i.deadline_seconds),
         i.first_key{"" if parts.is_one else " + " + step_behind_sql("i")}{", " + _CLAIMED if parts.starts else ""}
  FROM (
    SELECT i.*, f.step, f.first_key{", CASE WHEN i.may_start THEN f.starter END AS worker_id" if parts.starts else ""}
    FROM input i JOIN flows f ON f.place = i.flow
  ) i
  WHERE {has_sources} AND {is_result_kept}
  ON CONFLICT (id) DO NOTHING
  RETURNING id, model_name, context_id, prompt, worker_id
)
SELECT array_agg(id) AS ids,
  {_STARTED if parts.starts else ""}{notify_enqueued("worker_id IS NULL")}
FROM inserted
"""


def _take_keys_sql(parts: Parts, has_sources: str) -> str:
    """CTEs that take keys; `refused` are the rows whose key is another's, or whose job takes none.

    Idempotency keys first, in every statement: no two batches wait for each other.
    """
    refused, takes = [], ""
    if parts.keys:
        takes += take_keys_sql(has_sources)
        refused.append("key IS NOT NULL AND id NOT IN (SELECT result_id FROM keys)")
    if parts.jobs:
        takes += take_rows_sql(has_sources, replaces=parts.replaces)
        refused.append("job_id IS NOT NULL AND id NOT IN (SELECT result_id FROM job_keys)")
    return f"""{takes}refused AS (
  SELECT id, context_id FROM input WHERE {" OR ".join(refused)}
), {COUNT_ROWS if parts.jobs else ""}"""


def _has_sources(parts: Parts) -> str:
    """Condition: the context of a new result `i` exists, and the result that an attribution is about.

    The context is plain text unless the prompt is rendered. Both are locked, the context first, as its
    deletion does: a deletion or erasure under way is awaited, and they are missing then.
    """
    context = """EXISTS (
      SELECT FROM contexts c WHERE c.id = i.context_id AND c.team_id = i.team_id
        AND (i.prompt IS NOT NULL OR c.content IS NOT NULL) AND c.erased_at IS NULL FOR KEY SHARE)"""
    if parts.new_contexts:
        context = f"(i.has_new_context OR {context})" if parts.stored_contexts else "true"
    if not parts.sources:
        return context
    return f"""CASE WHEN {context}
    THEN i.source_id IS NULL OR EXISTS (
      SELECT FROM results s WHERE s.id = i.source_id AND s.team_id = i.team_id FOR KEY SHARE)
    ELSE false END"""
