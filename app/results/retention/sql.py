"""The statements of `retention`. Times are arguments, by the caller's clock.

Contexts are locked before results, both in the order of their ids and without waiting: rows that
another transaction holds are left to the next pass.
"""

# --- the turn and the clock of a pass ---------------------------------------------------------------

# $1: the database's time, $2: the seconds between two passes, $3: the most that the trusted time
# advances at once. One of all processes gets the pass, even after the clock was set back.
BEGIN = """
UPDATE retention_state SET looked_at = $1::timestamptz,
  trusted_at = least($1::timestamptz, coalesce(trusted_at + make_interval(secs => $3), $1::timestamptz))
WHERE looked_at IS NULL OR looked_at <= $1::timestamptz - make_interval(secs => $2)
  OR looked_at > $1::timestamptz + make_interval(secs => $2)
RETURNING trusted_at
"""
GO_ON = "UPDATE retention_state SET looked_at = $1::timestamptz"
BEGIN_CLEANING = """
UPDATE retention_state SET cleaned_at = $1::timestamptz
WHERE cleaned_at IS NULL OR cleaned_at <= $1::timestamptz - make_interval(secs => $2)
  OR cleaned_at > $1::timestamptz + make_interval(secs => $2)
RETURNING id
"""

# --- teams with rows ------------------------------------------------------------------------------


def _teams_of(table: str, condition: str = "true") -> str:
    return f"""(WITH RECURSIVE found AS (
    (SELECT team_id FROM {table} WHERE {condition} ORDER BY team_id LIMIT 1)
    UNION ALL
    SELECT (SELECT n.team_id FROM {table} n WHERE n.team_id > f.team_id AND {condition}
            ORDER BY n.team_id LIMIT 1)
    FROM found f WHERE f.team_id IS NOT NULL)
  SELECT team_id FROM found WHERE team_id IS NOT NULL)"""


TEAMS = f"""
{_teams_of("results")} UNION {_teams_of("contexts")} UNION {_teams_of("batches")}
UNION {_teams_of("jobs", "deleted_at IS NULL")} ORDER BY team_id
"""

# --- results that are due --------------------------------------------------------------------------

# Ids hold the time of creation, which precedes any end: younger rows than the cutoff are not due. So
# the index of lists serves, and a deployment that keeps everything pays for no index.
PAGE = """
SELECT id, context_id, finished_at FROM results
WHERE (team_id, id) > ($1, $2) AND (team_id, id) < ($1, $3)
ORDER BY team_id, id LIMIT $4
"""
EXPIRED = """
SELECT id, team_id, expires_at FROM results
WHERE expires_at <= $1 AND (expires_at, id) > ($2, $3) ORDER BY expires_at, id LIMIT $4
"""

# $2: the team's cutoff, or NULL; $3: now.
_IS_DUE = """coalesce({0}.finished_at <= $2::timestamptz, false)
  OR coalesce({0}.expires_at <= $3::timestamptz, false)"""
# It has ended, is counted, and has no pending delivery.
_IS_OVER = """{0}.state <> 'pending'
  AND EXISTS (SELECT FROM result_search s WHERE s.result_id = {0}.id)
  AND NOT EXISTS (SELECT FROM webhook_deliveries d WHERE d.result_id = {0}.id AND d.state = 'pending')"""
_ACTIVE = "state IN ('validating', 'in_progress', 'cancelling', 'finalizing')"

# The results of $1 that may be deleted: a group together, a text with its attributions, and a batch
# first stores the outcomes of its lines.
DELETABLE = f"""
WITH held AS MATERIALIZED (
  SELECT unnest(l.result_ids) AS id FROM batches b CROSS JOIN LATERAL (
    (SELECT result_ids FROM batch_lines WHERE batch_id = b.id AND state = 'sent')
    UNION ALL
    (SELECT result_ids FROM batch_lines WHERE batch_id = b.id AND state = 'waiting'
     ORDER BY line LIMIT 1000)) l
  WHERE b.team_id = $4 AND b.{_ACTIVE}
)
SELECT r.id, r.context_id FROM results r
WHERE r.id = ANY($1::uuid[]) AND ({_IS_DUE.format("r")}) AND {_IS_OVER.format("r")}
  AND NOT EXISTS (SELECT FROM results a WHERE a.source_id = r.id AND NOT ({_IS_OVER.format("a")}))
  AND (r.group_id IS NULL OR NOT EXISTS (
    SELECT FROM results o WHERE o.group_id = r.group_id AND NOT ({_IS_DUE.format("o")})))
  AND r.id NOT IN (SELECT id FROM held WHERE id IS NOT NULL)
"""

# Contexts ($1) that go with the last of their results ($2): nothing else refers to them, and their
# prompts' time ($3, or NULL) is over too, or they are erased. The lock keeps new results out.
LOCK_LAST = """
SELECT c.id FROM contexts c
WHERE c.id = ANY($1::uuid[]) AND NOT EXISTS (
  SELECT FROM results o WHERE o.context_id = c.id AND NOT (
    (o.id = ANY($2::uuid[]) OR coalesce(o.source_id = ANY($2::uuid[]), false))
    AND (c.erased_at IS NOT NULL OR coalesce(o.finished_at <= $3::timestamptz, false))))
ORDER BY c.id FOR UPDATE SKIP LOCKED
"""
# The others only lose results; a request that sends them does not wait.
LOCK_OTHERS = """
SELECT id FROM contexts WHERE id = ANY($1::uuid[]) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""
LOCK_RESULTS = """
SELECT id FROM results
WHERE (id = ANY($1::uuid[]) OR source_id = ANY($1::uuid[])) AND state <> 'pending'
ORDER BY id FOR UPDATE SKIP LOCKED
"""
DELETE_RESULTS = """
DELETE FROM results WHERE id = ANY ($1::uuid[]) RETURNING context_id, finished_at
"""
DELETE_CONTEXTS = """
DELETE FROM contexts c WHERE c.id = ANY($1::uuid[])
  AND NOT EXISTS (SELECT FROM results WHERE context_id = c.id)
RETURNING id
"""
# Their time counts from now on; every deletion of a result writes this.
MARK_UNUSED = """
UPDATE contexts c SET unused_since = greatest(c.unused_since, i.at)
FROM unnest($1::uuid[], $2::timestamptz[]) AS i(id, at)
WHERE c.id = i.id AND (c.unused_since IS NULL OR c.unused_since < i.at)
"""

# --- prompts that are due ----------------------------------------------------------------------------

_ALL_DUE = """NOT EXISTS (SELECT FROM results o
  WHERE o.context_id = {0}.id AND NOT coalesce(o.finished_at <= $2::timestamptz, false))"""
DUE_PROMPTS = f"""
SELECT c.id FROM contexts c
WHERE c.id = ANY($1::uuid[]) AND c.erased_at IS NULL AND {_ALL_DUE.format("c")}
"""
LOCK = "SELECT id FROM contexts WHERE id = ANY($1::uuid[]) ORDER BY id FOR UPDATE SKIP LOCKED"
UNUSED = """
SELECT id FROM contexts WHERE team_id = $1 AND unused_since <= $2
ORDER BY team_id, unused_since LIMIT $3 FOR UPDATE SKIP LOCKED
"""
# A separate statement after the lock: it sees results that were committed before it.
ERASE_CONTEXTS = f"""
UPDATE contexts c SET content = '', messages = NULL, erased_at = $3
WHERE c.id = ANY($1::uuid[]) AND c.erased_at IS NULL AND {_ALL_DUE.format("c")}
RETURNING id
"""
# The rendered prompt, also as token ids, its digest, and the stored request of a dialect.
ERASE_PROMPTS = """
WITH picked AS MATERIALIZED (
  SELECT id FROM results WHERE context_id = ANY($1::uuid[]) AND kind <> 'attribution'
  ORDER BY id FOR NO KEY UPDATE
)
UPDATE results r SET prompt = NULL, request = NULL, reuse_digest = NULL, parameters = r.parameters - 'prompt_token_ids'
WHERE id = ANY (ARRAY(SELECT id FROM picked))
RETURNING id
"""
# The answers are still found by their own words, which `word_indexer` finds. A process that does so now
# holds the row: a separate statement sees the words that it stored.
LOCK_WORDS = """
SELECT result_id AS id FROM result_search WHERE result_id = ANY($1::uuid[])
ORDER BY result_id FOR NO KEY UPDATE
"""
ERASE_WORDS = """
WITH erased AS (
  UPDATE result_search SET words = NULL WHERE result_id = ANY($1::uuid[]) AND words IS NOT NULL
  RETURNING result_id
)
INSERT INTO undigested_results (place, result_id)
SELECT -nextval((SELECT pg_get_serial_sequence('undigested_results', 'place')::regclass)), result_id
FROM erased RETURNING result_id AS id
"""
FORGET_UNUSED = """
UPDATE contexts SET unused_since = NULL WHERE id = ANY($1::uuid[]) AND unused_since IS NOT NULL
"""
MARK = "SELECT prompts_to FROM retention_marks WHERE team_id = $1"
SET_MARK = """
INSERT INTO retention_marks (team_id, prompts_to) VALUES ($1, $2)
ON CONFLICT (team_id) DO UPDATE SET prompts_to = excluded.prompts_to
"""

# --- batches and their files ---------------------------------------------------------------------------

# The outcomes of a batch have the retention of results ($2).
OLD_BATCHES = """
SELECT id, input_file_id, output_file_id, error_file_id, ended_at FROM batches
WHERE (team_id, id) > ($1, '00000000-0000-0000-0000-000000000000') AND (team_id, id) < ($1, $3)
  AND ended_at <= $2
ORDER BY team_id, id LIMIT $4 FOR UPDATE SKIP LOCKED
"""
DELETE_BATCHES = "DELETE FROM batches WHERE id = ANY($1::uuid[])"
DELETE_FILES = "DELETE FROM files WHERE id = ANY($1::uuid[]) AND team_id = $2"
# Its input file has the retention of prompts. `files` removes expired files.
EXPIRE_INPUTS = """
UPDATE files f SET expires_at = least(f.expires_at, i.at)
FROM unnest($1::uuid[], $2::timestamptz[]) AS i(id, at)
WHERE f.id = i.id AND f.team_id = $3 AND NOT EXISTS (
  SELECT FROM batches b WHERE b.team_id = $3 AND b.input_file_id = f.id)
"""
DELETE_INPUTS = """
DELETE FROM files WHERE id IN (
  SELECT b.input_file_id FROM batches b JOIN files f ON f.id = b.input_file_id
  WHERE b.team_id = $1 AND b.id < $3 AND f.team_id = $1 AND NOT EXISTS (
    SELECT FROM batches o WHERE o.team_id = $1 AND o.input_file_id = b.input_file_id
      AND NOT coalesce(o.ended_at <= $2, false))
  LIMIT $4)
RETURNING id
"""

# --- jobs -----------------------------------------------------------------------------------------

# Jobs that ended before $2, or are open and have not changed since; `JobKeeper` removes their rows.
DELETE_JOBS = """
UPDATE jobs SET deleted_at = now() WHERE id = ANY (ARRAY(
  SELECT j.id FROM jobs j
  WHERE (j.team_id, j.id) > ($1, '00000000-0000-0000-0000-000000000000')
    AND (j.team_id, j.id) < ($1, $3) AND j.deleted_at IS NULL
    AND (j.ended_at <= $2 OR j.closed_at IS NULL AND (
      SELECT p.changed_at FROM job_progress p WHERE p.job_id = j.id) <= $2)
    AND (SELECT r.result_id FROM job_rows r
         WHERE (r.job_id, r.result_id) > (j.id, '00000000-0000-0000-0000-000000000000')
           AND (r.job_id, r.result_id) < (j.id, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
           AND r.place IS NULL
         ORDER BY r.job_id, r.result_id LIMIT 1) IS NULL
    AND NOT EXISTS (
      SELECT FROM webhook_deliveries d WHERE d.result_id = j.id AND d.state = 'pending')
  ORDER BY j.team_id, j.id LIMIT $4 FOR UPDATE SKIP LOCKED))
RETURNING id
"""

# --- the index of words ----------------------------------------------------------------------------------

# A GIN index keeps every word that it ever held: once as many rows are gone ($1 more) as exist, it is
# rebuilt by the process that resets the count. $2: the fewest rows worth a rebuild.
OUTGROW_WORDS = """
WITH counted AS (
  UPDATE retention_state SET words_gone = words_gone + $1 WHERE $1 > 0 RETURNING words_gone
)
SELECT words_gone >= greatest($2, (
  SELECT reltuples FROM pg_class WHERE oid = 'result_search'::regclass)) AS is_due FROM counted
"""
TAKE_WORDS = """
UPDATE retention_state SET words_gone = 0 WHERE words_gone >= $1 RETURNING id
"""
BROKEN_WORDS = """
SELECT c.relname AS name FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = 'result_search'::regclass AND NOT i.indisvalid
  AND c.relname ~ '^ix_result_search_words_cc'
"""
